"""Losses of one's own with models of transformers: packed pairs, and a router's auxiliary loss."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from own_losses import drawn, log_prob, preferred
from tiny_transformers import tiny
from training import grid, on_a_layout, ranks_of

from scaletorch.compose import parallelize, shard_global_batch, token_losses, train_step
from scaletorch.dist import all_reduce
from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.expert_parallel import global_balance_loss
from scaletorch.parallel.pg_manager import get_process_group_manager

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # the first ranks import transformers

BOUNDS = torch.tensor((0, 5, 11, 12, 21))  # chosen, rejected, chosen, rejected


def llama():
    return drawn(tiny("Llama", use_cache=False), 0)


def mixtral():
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_local_experts": 4}
    return drawn(tiny("Mixtral", use_cache=False, **asked), 0)


def balanced(output, batch):
    """Add the routers' loss as the guide says: a term of the global batch, once for each token."""
    count = (batch["labels"] != -100).sum()
    total = count.clone()
    all_reduce(total, group=get_process_group_manager().cp_dp_group)
    scores = torch.cat(output.router_logits).softmax(-1)
    balance = 2 * global_balance_loss(scores, scores.topk(2).indices)
    return token_losses(output, batch).sum() + 0.1 * total * balance, count


def packed():
    """Return rows of four documents, with what each one is told apart by."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(32, (2, 4, 21), generator=generator).unbind()
    labels[:, BOUNDS[1:] - 1] = -100
    positions = torch.arange(21) - BOUNDS[:-1].repeat_interleave(BOUNDS.diff())
    told = {"position_ids": positions.expand(ids.shape), "cu_seq_lens_q": BOUNDS}
    return {"input_ids": ids, "labels": labels, **told}


def preferring(output, batch):
    found = log_prob(output, batch)
    return preferred(found), found.numel() // 2


def pairs_packed(batch):
    return 2 * len(batch["input_ids"])


def compare(model, loss, results, bound=1e-11):
    loss.backward()
    known = {name: p.grad for name, p in model.named_parameters()}
    for figures in results:
        assert figures.losses == pytest.approx([loss.item()], rel=bound)
        errors = [relative_error(figures.gradients[0][n], g) for n, g in known.items()]
        assert worst(errors) < bound, errors


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"cp_size": 2}, {}), ({"tp_size": 2, "cp_size": 2, "pp_size": 2}, {"loss_parallel": True})],
)
def test_packed_pairs(sizes, options):
    model, whole = llama(), packed()
    sums = []
    for row, labels in zip(whole["input_ids"], whole["labels"], strict=True):
        for start, end in pairwise(BOUNDS):
            logits = model(input_ids=row[None, start:end]).logits[0]
            targets = labels[start:end]
            sums.append(-F.cross_entropy(logits, targets, reduction="sum"))
    chosen, rejected = torch.stack(sums).view(-1, 2).unbind(-1)
    loss = -F.logsigmoid(chosen - rejected).mean()
    told = {"loss_fn": preferring, "count_fn": pairs_packed, "micro_batches": 2}
    ranks, given = ranks_of(sizes), (llama, sizes, [whole])
    compare(model, loss, run_ranks(on_a_layout, ranks, *given, options=options, **told))


@pytest.mark.parametrize("sizes", [{"dp_size": 2, "ep_size": 2}, {"cp_size": 2, "tp_size": 2}])
def test_a_loss_adds_the_routers_of_the_global_batch(sizes):
    model, generator = mixtral(), torch.Generator().manual_seed(4)
    ids, labels = torch.randint(32, (2, 4, 12), generator=generator).unbind()
    whole = {"input_ids": ids, "labels": labels}
    output = model(**{"input_ids": ids, "output_router_logits": True})
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()) + 0.1 * output.aux_loss
    given = mixtral, sizes, [whole]
    # It routes in float32.
    compare(model, loss, run_ranks(on_a_layout, ranks_of(sizes), *given, loss_fn=balanced), 1e-6)


@pytest.mark.parametrize("sizes", [{"dp_size": 2, "tp_size": 2}, {"pp_size": 2}])
def test_the_routers_loss_is_not_left_out_in_silence(sizes):
    run_ranks(refused, ranks_of(sizes), sizes)


def refused(sizes):
    with grid(sizes) as manager:
        model = parallelize(mixtral(), manager)
        ids = torch.arange(48).view(4, 12) % 32
        whole = {"input_ids": ids, "labels": ids}
        with pytest.raises(ScaletorchError, match=r"has aux_loss beside its|an auxiliary loss"):
            train_step(model, shard_global_batch(whole, 1, model=model))

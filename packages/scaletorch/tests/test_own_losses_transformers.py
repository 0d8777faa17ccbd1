"""Losses of one's own with models of transformers: packed pairs, and a router's auxiliary loss."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from own_losses import drawn, log_prob, preferred, smoothed
from tiny_transformers import tiny
from training import on_a_layout, ranks_of

from scaletorch.dist.testing import relative_error, run_ranks, worst

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(300)  # the first ranks import transformers

BOUNDS = torch.tensor((0, 5, 11, 12, 21))  # chosen, rejected, chosen, rejected


def llama():
    return drawn(tiny("Llama", use_cache=False), 0)


def mixtral():
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_local_experts": 4}
    return drawn(tiny("Mixtral", use_cache=False, **asked), 0)


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


def test_a_router_s_loss_is_added():
    model, generator = mixtral(), torch.Generator().manual_seed(4)
    ids, labels = torch.randint(32, (2, 4, 12), generator=generator).unbind()
    whole = {"input_ids": ids, "labels": labels}
    output = model(**{"input_ids": ids, "output_router_logits": True})
    flat = output.logits.flatten(0, 1)
    loss = F.cross_entropy(flat, labels.flatten(), label_smoothing=0.1) + 0.1 * output.aux_loss
    given = mixtral, {"dp_size": 2}, [whole]
    # It routes in float32.
    compare(model, loss, run_ranks(on_a_layout, 2, *given, loss_fn=smoothed), 1e-6)

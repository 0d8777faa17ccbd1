"""The norm over the grid counts each element of the plain model once, whole or in shards."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from scaletorch.compose import (
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    global_grad_norm,
    nonfinite_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import NonFiniteError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import Shard, shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import Divide, Fused, apply_tensor_parallel

ORDERS = (2.0, 1.0, math.inf)
CLIP = 0.25


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    preload("torch._dynamo")  # which the first optimizer of a process imports


def build(tied):
    torch.manual_seed(3)
    sizes = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
        num_kv_heads=1, tie_embeddings=tied,
    )  # fmt: skip
    model = Llama(sizes).double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    return model


def global_batch():
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def plain_gradients(tied):
    model, batch = build(tied), global_batch()
    logits = model(batch["input_ids"])
    F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def norms_of(tensors):
    flat = torch.cat([t.flatten() for t in {id(t): t for t in tensors}.values()])
    return [torch.linalg.vector_norm(flat, order).item() for order in ORDERS]


def grid(layout):
    dp, pp, cp, tp = layout
    return setup_process_group_manager(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp)


def shard(model, manager, tied):
    """Divide what is not tied over cp x dp, in ranges that end anywhere within parameters."""
    rank, ranks = manager.cp_dp_rank, manager.cp_dp_size
    total = sum(p.numel() for n, p in model.named_parameters() if n not in tied)
    cuts, at, shards = [i * total // ranks for i in range(ranks + 1)], 0, []
    for name, p in model.named_parameters():
        if name in tied:
            shards.append(Shard(name, p, 0, p.numel(), p, replicated=True))
            continue
        start, stop = (min(max(cut - at, 0), p.numel()) for cut in cuts[rank : rank + 2])
        at += p.numel()
        if start < stop:
            tensor = p.detach().flatten()[start:stop].clone()
            tensor.grad = p.grad.flatten()[start:stop].clone()
            shards.append(Shard(name, p, start, stop, tensor, replicated=False))
    model.optimizer_shards = shards
    return model


def stepped(layout, tied):
    manager = grid(layout)
    model = parallelize(build(tied), manager, bucket_size=900, rehearse=False)
    train_step(model, shard_global_batch(global_batch(), 2, manager), manager)
    return manager, model


def measure(model, manager):
    """Return the norms, and how many collectives each took."""
    norms, calls = [], []
    for order in ORDERS:
        with patch("torch.distributed.all_reduce", wraps=distributed.all_reduce) as spy:
            norms.append(global_grad_norm(model, manager, norm_type=order).item())
        calls.append(spy.call_count)
    return norms, calls


def llama(layout, tied):
    manager, model = stepped(layout, tied)
    whole = measure(model, manager)
    sharded = measure(shard(model, manager, model.tied_parameters), manager)
    norm = clip_grad_norm_(model, CLIP, manager).item()
    assert norm == sharded[0][0]
    clipped = measure(model, manager)
    del model.optimizer_shards  # gradients of what is replicated are clipped by now
    for name, p in model.named_parameters():
        if name in model.tied_parameters:
            p.grad *= norm / CLIP
    assert clip_grad_norm_(model, CLIP, manager).item() == pytest.approx(norm, rel=1e-5)
    gradients = full_gradients(model, manager)
    destroy_process_group_manager()
    return whole, sharded, clipped, gradients


LAYOUTS = [(1, 2, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1), (1, 1, 2, 2), (1, 1, 1, 4), (2, 2, 1, 2)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_layouts_have_one_process_s_norm(layout, tied):
    gradients = plain_gradients(tied)
    expected = norms_of(gradients.values())
    dp, pp, cp, tp = layout
    axes = (tp > 1) + (pp > 1)
    results = run_ranks(llama, math.prod(layout), layout, tied, timeout=200)
    for whole, sharded, clipped, found in results:
        assert (whole[0], sharded[0]) == (results[0][0][0], results[0][1][0])  # the same bits
        assert whole[0] == pytest.approx(expected, rel=1e-10)
        assert sharded[0] == pytest.approx(expected, rel=1e-10)
        assert whole[1] == [axes] * 3
        assert sharded[1] == [axes + (dp * cp > 1)] * 3
        assert clipped[0] == pytest.approx([n * CLIP / expected[0] for n in expected], rel=1e-5)
        for name, gradient in found.items():
            part = gradients[name] * CLIP / expected[0]
            torch.testing.assert_close(gradient, part, rtol=1e-5, atol=1e-9)


def clipped_training(layout, tied, stage):
    """Two clipped steps of a sharded optimizer; returns norms and whole weights."""
    manager = grid(layout)
    model = parallelize(build(tied), manager, bucket_size=900, rehearse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    shard_optimizer(optimizer, model, stage=stage)
    norms = []
    for _ in range(2):
        train_step(model, shard_global_batch(global_batch(), 2, manager), manager)
        norms.append(clip_grad_norm_(model, CLIP, manager).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = full_state_dict(model, manager)
    destroy_process_group_manager()
    return norms, weights


def plain_clipped_training(tied):
    model, batch, norms = build(tied), global_batch(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        logits = model(batch["input_ids"])
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("layout", [(2, 2, 1, 1), (2, 1, 1, 2), (1, 1, 2, 2)])
def test_sharded_optimizers_are_clipped_as_one_process(layout, stage):
    norms, weights = plain_clipped_training(tied=True)
    results = run_ranks(clipped_training, 4, layout, True, stage)
    for found_norms, found in results:
        assert found_norms == results[0][0]
        assert found_norms == pytest.approx(norms, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-11)


class Packed(nn.Module):
    """Queries of four heads, keys and values of one, in one weight."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 1
        self.qkv = nn.Linear(8, 6 * 3)
        self.out = nn.Linear(12, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).split([n * 3 for n in (self.num_heads, 1, 1)], -1)
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


PLAN = {"": Divide("num_heads"), "qkv": Fused("column", (12, 3, 3)), "out": "row"}


def packed(parallel):
    torch.manual_seed(0)
    model = Packed().double()
    manager = grid((2, 1, 1, 2)) if parallel else None
    if manager is not None:
        apply_tensor_parallel(model, PLAN, manager.tp_group)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model(x).sin().sum().backward()  # alike over dp
    if manager is None:
        return norms_of([p.grad for p in model.parameters()])
    whole = measure(model, manager)[0]
    first = measure(shard(model, manager, ()), manager)[0]
    again = measure(model, manager)[0]  # with what was derived for these shards
    assert first == again
    return whole, first


def test_replicated_parts_of_fused_weights_count_once():
    expected = packed(False)
    for found in run_ranks(packed, 4, True):
        for norms in found:
            assert norms == pytest.approx(expected, rel=1e-12)


def poisoned(layout, sharded, victim, value):
    """Put one bad element where `victim` says, and let everyone look for it."""
    manager, model = stepped(layout, tied=False)
    if sharded:
        shard(model, manager, ())
    assert nonfinite_gradients(model, manager) == []
    name, place = victim
    if str(manager.grid.coordinates(manager.global_rank)) in place:
        if sharded:
            tensor = next(s.tensor for s in model.optimizer_shards if s.name == name)
        else:
            tensor = dict(model.named_parameters())[name]
        tensor.grad.view(-1)[-1] = value
    found = nonfinite_gradients(model, manager)
    with pytest.raises(NonFiniteError) as caught:
        clip_grad_norm_(model, CLIP, manager, error_if_nonfinite=True)
    destroy_process_group_manager()
    return found, str(caught.value)


WEIGHT = "layers.1.mlp.up_proj.weight"
VICTIMS = [
    ((1, 2, 1, 2), False, (WEIGHT, ("dp0 pp1 cp0 tp1",)), math.inf),
    ((2, 1, 1, 2), False, (WEIGHT, ("dp0 pp0 cp0 tp1", "dp1 pp0 cp0 tp1")), math.nan),
    ((2, 2, 1, 1), True, ("norm.weight", ("dp1 pp1 cp0 tp0",)), -math.inf),
]


@pytest.mark.parametrize(("layout", "sharded", "victim", "value"), VICTIMS)
def test_what_is_not_finite_somewhere_is_named_everywhere(layout, sharded, victim, value):
    name, places = victim
    for found, message in run_ranks(poisoned, 4, layout, sharded, victim, value):
        assert found == [(name, place) for place in places]
        assert f"{name} on {', '.join(places)}. Skip the step" in message

"""Recomputed layers give the same bits, and seeds agree and differ where they must."""

import copy

import pytest
import torch
from small_models import Stack
from sweeps import today
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import SIZES, grid, llama, tokens

from scaletorch.compose import (
    parallelize,
    recompute_layers,
    seed_ranks,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks


def trained(manager, recompute):
    options = {"sequence_parallel": manager.tp_size > 1, "cp_method": "all_gather"}
    model = parallelize(llama(), manager, recompute=recompute, **options, rehearse=False)
    loss = train_step(model, shard_global_batch(tokens(), 2, manager), manager)
    return loss, {name: p.grad for name, p in model.named_parameters()}


def compare(sizes):
    with grid(sizes) as manager:
        plain_loss, plain = trained(manager, False)
        for option in (True, "selective"):
            loss, gradients = trained(manager, option)
            assert torch.equal(loss, plain_loss)
            assert gradients.keys() == plain.keys()
            assert all(torch.equal(gradients[name], plain[name]) for name in plain)


@pytest.mark.parametrize("axis", ["tp_size", "cp_size", "pp_size", "dp_size"])
def test_same_bits_with_recomputation(axis):
    run_ranks(compare, 2, {axis: 2})


class Checkpointed(Stack):
    """A layer within a checkpoint of the model's own; what it keeps is written to."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def run(self, layer, x):
        return checkpoint(lambda y: layer(y * 2).mul_(y), x, use_reentrant=False)


@distributed_test(2)
def test_selection_leaves_a_checkpoint_of_the_model_alone():
    with grid(dp_size=2) as manager:
        gradients = []
        for option in (False, "selective"):
            torch.manual_seed(0)
            model = parallelize(Checkpointed().double(), manager, recompute=option, rehearse=False)
            train_step(model, shard_global_batch(tokens(), 2, manager), manager)
            gradients.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *gradients))


class Watched(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_selection_runs_products_and_attention_once():
    counts = {}
    for select in (False, True):
        model = llama()
        if select:
            recompute_layers(model, recompute="selective")
        loss = model(torch.arange(32).view(2, 16)).sum()
        with Watched() as watched:
            loss.backward()
        counts[select] = watched.names
    for name in ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert counts[True].count(name) == counts[False].count(name)
    assert (
        counts[True].count("aten::silu") == SIZES["num_layers"] > counts[False].count("aten::silu")
    )


def saved_bytes(model):
    """Return how many bytes a forward keeps for backward."""
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 64, dtype=torch.int64))
    return kept


@pytest.mark.parametrize("way", [True, "selective"])
def test_recomputation_keeps_less_and_copies_call_themselves(way):
    model = llama()
    plain = saved_bytes(model)
    recompute_layers(model, recompute=way)
    assert saved_bytes(model) < plain / (2 if way is True else 1)
    twin = copy.deepcopy(model)
    for parameter in twin.layers.parameters():
        parameter.data.zero_()
    ids = torch.arange(8)[None]
    assert not torch.equal(twin(ids), model(ids))
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))


def test_another_word_for_recomputation_is_refused():
    words = 'must be True, False or "selective", g'
    with grid() as manager, pytest.raises(InvalidArgumentError, match=words):
        parallelize(llama(), manager, recompute="disk", rehearse=False)


def test_a_forward_set_on_the_instance_is_recomputed_too():
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]))
    layer = model[0][0]
    layer.forward = lambda x: x * layer.weight.sum()
    recompute_layers(model)
    layer(torch.ones(4, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None


def draws(seed):
    with grid(tp_size=2, cp_size=2) as manager:
        seed_ranks(seed, manager)
    return manager.cp_rank, manager.tp_rank, torch.rand(4).tolist()


def test_seeds_agree_over_tp_alone():
    first, again = run_ranks(draws, 4, 1), run_ranks(draws, 4, 1)
    by_place = {(cp, tp): numbers for cp, tp, numbers in first}
    assert first == again
    assert by_place[0, 0] == by_place[0, 1] != by_place[1, 0] == by_place[1, 1]
    assert run_ranks(draws, 4, 2)[0] != first[0]


class Counting(nn.Module):
    """A layer that depends on how often it was called, as a warm-up of its own does."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return x + torch.tanh(self.inner(x) / self.calls)


class Noting(Counting):
    """One that makes an attribute in its first call."""

    def forward(self, x):
        self.seen = self.calls + 1
        return super().forward(x)


def counted(sizes, way, compiled=False):
    """Train three steps; return the losses, and the weights and counts of this rank."""
    with grid(sizes) as manager:
        torch.manual_seed(0)
        plan = {"head": "column_gather"}
        model = Stack((Counting if compiled else Noting)() for _ in range(4)).double()
        model = parallelize(model, manager, recompute=way, plan=plan)
        for layer in model.layers if compiled else ():
            layer.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(3):
            losses.append(train_step(model, shard_global_batch(tokens(step), 1, manager)).item())
            optimizer.step()
            optimizer.zero_grad()
        counts = {
            name: each.calls for name, each in model.named_modules() if hasattr(each, "calls")
        }
    return losses, {name: p.detach() for name, p in model.named_parameters()}, counts


LAYOUTS = (
    {"dp_size": 4}, {"dp_size": 2, "pp_size": 2}, {"cp_size": 2, "dp_size": 2},
    {"tp_size": 2, "dp_size": 2}, {"pp_size": 2, "tp_size": 2},
)  # fmt: skip


@pytest.mark.parametrize("sizes", today(LAYOUTS, 5), ids=str)
def test_what_counts_its_calls_counts_each_once(sizes):
    plain = run_ranks(counted, 4, sizes, False)
    for way, compiled in ((True, False), (True, True), ("selective", False)):
        again = run_ranks(counted, 4, sizes, way, compiled)
        for (losses, weights, counts), (others, found, calls) in zip(plain, again, strict=True):
            assert others == losses
            assert calls == counts
            assert 3 in counts.values()
            assert {*counts.values()} <= {0, 3}  # 0 in layers of other stages
            assert all(torch.equal(found[name], weight) for name, weight in weights.items())

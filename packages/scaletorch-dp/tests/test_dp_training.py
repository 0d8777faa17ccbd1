"""Training under both wrappers against one process on the whole batch, in float64."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch
import torch.distributed as c10d
from in_turn import for_each, in_turn_of
from torch import nn
from torch.nn import functional

from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    DataParallelNaive,
    global_token_count,
)
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

in_turn = in_turn_of(__name__)

WRAPPERS = {
    "naive": (DataParallelNaive, {}),
    "bucket-1": (DataParallelBucket, {"bucket_size": 1}),
    "bucket-100": (DataParallelBucket, {"bucket_size": 100}),
    "bucket-default": (DataParallelBucket, {}),
}
ROWS, LENGTH, VOCABULARY = 8, 5, 11


class TinyLM(nn.Module):
    """Tied head, a frozen layer, a parameter that nothing uses, and a scalar one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.frozen = nn.Linear(6, 6)
        self.up = nn.Linear(6, 12)
        self.never = nn.Parameter(torch.ones(3))
        self.down = nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.frozen(self.embed(ids))
        return self.head(x + self.scale * self.down(torch.tanh(self.up(x))))


def build(dtype=torch.float64):
    torch.manual_seed(3)
    return TinyLM().to(dtype)


def micro_batch(step, micro, rank, world_size):
    """Return this rank's rows; the later ranks have few valid tokens, or none."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, max(0, LENGTH - row % 3) :] = -100
    labels[ROWS // 2 if micro else 3 * ROWS // 4 :] = -100
    share = ROWS // world_size
    return (t[rank * share : (rank + 1) * share] for t in (ids, labels))


def loss_sum(model, ids, labels):
    logits = model(ids).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def train(model, rank, world_size, mode, set_to_none, zero=True):
    """Run three steps of two micro-batches; return every gradient and the final weights."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    history = []
    for step in range(3):
        if zero:
            optimizer.zero_grad(set_to_none=set_to_none)
        micros = [tuple(micro_batch(step, micro, rank, world_size)) for micro in range(2)]
        count = sum((labels != -100).sum() for _, labels in micros)
        if world_size > 1:
            count = global_token_count([labels for _, labels in micros], group=c10d.group.WORLD)
        for micro, (ids, labels) in enumerate(micros):
            last = micro == 1
            with contextlib.ExitStack() as stack:
                if mode == "no_sync" and not last:
                    stack.enter_context(model.no_sync())
                if mode == "attribute":
                    model.require_backward_grad_sync = last
                (loss_sum(model, ids, labels) / count).backward()
        history.append({n: copy_of(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
    history.append({n: copy_of(p) for n, p in model.named_parameters()})
    return history


def copy_of(tensor):
    return None if tensor is None else tensor.detach().clone()


def assert_same(history, reference, tolerance=1e-12):
    for found, expected in zip(history, reference, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if value is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(
                    found[name], value, rtol=tolerance, atol=tolerance, msg=name
                )


def check_training(wrapper, zero=True):
    rank, world_size = c10d.get_rank(), c10d.get_world_size()
    kind, options = WRAPPERS[wrapper]
    for set_to_none in (True, False):
        reference = train(build(), 0, 1, "every", set_to_none, zero)
        for mode in ("every", "no_sync", "attribute"):
            model = kind(build(), group=c10d.group.WORLD, **options)
            assert_same(train(model, rank, world_size, mode, set_to_none, zero), reference)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_matches_one_process(world_size):
    run_ranks(in_turn, world_size, for_each(check_training, product(WRAPPERS)), timeout=200)


def test_gradients_add_up_over_steps_that_never_zero():
    run_ranks(in_turn, 2, for_each(check_training, product(WRAPPERS, [False])), timeout=200)


def test_one_process_needs_no_group():
    model = DataParallelBucket(build())
    assert_same(train(model, 0, 1, "no_sync", True), train(build(), 0, 1, "every", True))
    assert not model.module.up.weight._backward_hooks


def check_subgroups():
    """Two halves of four ranks train each its own model, also with a mean."""
    rank = c10d.get_rank()
    halves = [c10d.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = halves[rank // 2]
    try:
        for op in ("sum", "mean"):
            model = DataParallelBucket(nn.Linear(2, 1, bias=False).double(), group=half, op=op)
            model(torch.full((1, 2), float(rank + 1), dtype=torch.float64)).sum().backward()
            total = {0: 3.0, 1: 7.0}[rank // 2] / (2 if op == "mean" else 1)
            assert model.weight.grad.tolist() == [[total, total]]
    finally:
        c10d.destroy_process_group(half)


def check_axis():
    """Without a group: over context and data ranks, and never over tensor ranks."""
    rank = c10d.get_rank()
    for layout in ({"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "cp_size": 2}):
        setup_process_group_manager(**layout)
        try:
            model = DataParallelBucket(nn.Linear(2, 1, bias=False))
            model(torch.full((1, 2), 10.0**rank)).sum().backward()
            total = 10.0**rank + 10.0 ** ((rank + 2) % 4)
            assert model.weight.grad.tolist() == [[total, total]]
            del model
        finally:
            destroy_process_group_manager()
    with pytest.raises(StateError, match="no process group for the cp_dp axis"):
        DataParallelBucket(nn.Linear(2, 1))


def test_reduces_over_its_group_only_by_default_the_cp_dp_axis_of_the_manager():
    run_ranks(in_turn, 4, [check_subgroups, check_axis])


def check_channels_last():
    """A fused optimizer wants gradients with its parameters' strides."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = DataParallelBucket(net, group=c10d.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    assert net.weight.grad.stride() == net.weight.stride()


def test_gradients_have_the_parameters_strides():
    run_ranks(check_channels_last, 2)

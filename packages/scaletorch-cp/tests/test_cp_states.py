"""Modules that pass a state along the sequence see whole sequences of some rows."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import apply_context_parallel, shard_sequence
from scaletorch.parallel.context_parallel.cp_comms import ring_of
from scaletorch.parallel.context_parallel.models.settings import Settings
from scaletorch.parallel.context_parallel.models.whole_sequences import exchange_for, keep_whole

WIDTH, LENGTH = 6, 16


class Decaying(nn.Module):
    """A causal convolution, then a decaying sum; it returns its last state too."""

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden, scale=None, kept=None):
        x = self.conv1d(hidden.mT)[..., : hidden.shape[1]].mT
        if kept is not None:
            x = x.masked_fill(~kept[..., None], 0.0)
        if scale is not None:
            x = x * scale
        state, outputs = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = state * self.decay + step
            outputs.append(state)
        return torch.stack(outputs, 1), state


def build():
    torch.manual_seed(5)
    return Decaying().double()


def apply(model, layout, group=None):
    """Make a model context parallel whose state-passing modules are said by hand."""
    keep_whole([model])
    return apply_context_parallel(model, group or dist.group.WORLD, layout=layout)


def differences(rows, layout):
    """Return how far outputs and gradients are from one process's, and whether its state is NaN."""
    plain = build()
    model = apply(copy.deepcopy(plain), layout)
    generator = torch.Generator().manual_seed(6)
    whole = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    scale = torch.rand(1, LENGTH, 1, generator=generator, dtype=torch.float64)
    kept = torch.rand(rows, LENGTH, generator=generator) < 0.7
    wanted = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    mine, theirs = (x.clone().requires_grad_() for x in (whole, whole))

    def cut(x):
        return shard_sequence(x, layout=layout, group=dist.group.WORLD)

    expected, _ = plain(theirs, scale, kept)
    expected.backward(wanted)
    own, own_scale, own_wanted = cut(mine), cut(scale), cut(wanted)
    out, state = model(own, own_scale, cut(kept))
    gradient = torch.autograd.grad(out, [own, *model.parameters()], own_wanted)
    for each in gradient[1:]:
        dist.all_reduce(each)
    found = [out, gradient[0], *gradient[1:]]
    right = [cut(expected), cut(theirs.grad), *(p.grad for p in plain.parameters())]
    error = worst(map(relative_error, found, right))
    return error, bool(state.isnan().all())


def all_differences():
    kinds = ("contiguous", "zigzag", "stripe")
    return {(rows, kind): differences(rows, kind) for rows in (1, 4, 7) for kind in kinds}


def test_any_rows_in_any_layout():
    for found in run_ranks(all_differences, 4, timeout=200):
        for case, (error, lost) in found.items():
            assert error <= 1e-13, case
            assert lost, "a state of other rows must not look like one"


@distributed_test(2)
def test_what_has_no_rows_is_refused():
    with pytest.raises(InvalidArgumentError, match="without hidden states"):
        apply(build(), "zigzag", dist.new_group())(torch.zeros(4, 4).double())


def exchanged():
    """Exchange rows and positions of tensors that stand for an accelerator's."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    settings = Settings("zigzag", "ring", ring_of(dist.group.WORLD))
    with FakeTensorMode():  # which refuses calls with tensors of two devices
        hidden = torch.empty(4, 8, WIDTH, device="cuda")
        exchange = exchange_for(settings, hidden)
        rows = exchange.to_rows(hidden)
        back = exchange.to_positions(rows)
    return [(tuple(x.shape), x.device.type) for x in (rows, back)]


def test_positions_are_put_in_order_where_hidden_states_are():
    assert run_ranks(exchanged, 1, init=False) == [
        [((2, 16, WIDTH), "cuda"), ((4, 8, WIDTH), "cuda")]
    ]

"""Random sequences of backward, zero_grad and no_sync, against the rule in plain numbers."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as c10d
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, DataParallelNaive

RANKS, PARAMETERS = 2, 4
USE = st.lists(st.integers(0, PARAMETERS - 1), min_size=1, unique=True)
EVENTS = st.one_of(
    st.tuples(st.just("backward"), st.booleans(), st.tuples(*[USE] * RANKS)),
    st.tuples(st.just("zero"), st.booleans()),
    st.tuples(st.just("scale")),
    st.tuples(st.just("autograd.grad"), USE),
)


class Weights(nn.Module):
    """Its gradients are the coefficients that it is called with."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            [torch.zeros(1 + at, dtype=torch.float64) for at in range(PARAMETERS)]
        )

    def forward(self, use, coefficient):
        return sum((self.weights[at] * (coefficient + at)).sum() for at in use)


class Rule:
    """For each parameter: what is synchronised, and what each rank has of its own."""

    def __init__(self):
        self.synced = [None] * PARAMETERS
        self.own = [[None] * PARAMETERS for _ in range(RANKS)]

    def backward(self, sync, uses, coefficients):
        for rank, use in enumerate(uses):
            for at in use:
                self.own[rank][at] = (self.own[rank][at] or 0) + coefficients[rank] + at
        for at in range(PARAMETERS) if sync else ():
            parts = [own[at] for own in self.own if own[at] is not None]
            if parts:
                self.synced[at] = (self.synced[at] or 0) + sum(parts)
                for own in self.own:
                    own[at] = None

    def zero(self, to_none):
        for row in [self.synced, *self.own]:
            row[:] = [None if to_none or value is None else 0 for value in row]

    @property
    def settled(self):
        return all(value is None for own in self.own for value in own)


def play(events, naive, bucket_size):
    rank, world = c10d.get_rank(), c10d.group.WORLD
    if naive:
        model = DataParallelNaive(Weights(), world)
    else:
        model = DataParallelBucket(Weights(), bucket_size=bucket_size, group=world)
    rule = Rule()
    for at, (kind, *rest) in enumerate([*events, ("backward", True, [[0], [0]])]):
        coefficients = [10 * at + 100 * each for each in range(RANKS)]
        if kind == "backward":
            sync, uses = rest
            with contextlib.nullcontext() if sync else model.no_sync():
                model(uses[rank], coefficients[rank]).backward()
            rule.backward(sync, uses, coefficients)
        elif kind == "zero":
            model.zero_grad(set_to_none=rest[0])
            rule.zero(rest[0])
        elif kind == "scale" and rule.settled:  # as clipping does
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            rule.synced = [value if value is None else value / 2 for value in rule.synced]
        elif kind == "autograd.grad":
            torch.autograd.grad(model(rest[0], 1.0), [model.weights[at] for at in rest[0]])
        if rule.settled:
            found = [None if w.grad is None else w.grad.unique().tolist() for w in model.weights]
            assert found == [None if value is None else [value] for value in rule.synced], events


BEHIND = ("backward", False, ([0], [0, 1]))  # only rank 1 has one with no sum held beside it
TWICE = [("backward", False, ([0], [0])), ("backward", True, ([0], [0])), BEHIND, ("zero", False)]


@settings(max_examples=60, deadline=None)
@example(TWICE, False, 1)
@given(st.lists(EVENTS, max_size=9), st.booleans(), st.sampled_from([1, 3, 100]))
def test_any_sequence_follows_the_rule(events, naive, bucket_size):
    run_ranks(play, RANKS, events, naive, bucket_size)

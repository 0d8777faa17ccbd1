"""Ranks that wrap different models are told so on every rank, before any gradient is mixed."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as c10d
from in_turn import for_each, in_turn
from torch import nn

from scaletorch.dist.errors import MismatchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, DataParallelNaive


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(2, 3), nn.Linear(3, 4)


class Swapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(3, 4), nn.Linear(2, 3)


class Plain(nn.Module):
    def __init__(self, width=3, frozen=False):
        super().__init__()
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, 4)
        self.first.requires_grad_(not frozen)


ODD = {
    "name": (Renamed, ["- second.weight (4, 3) torch.float32", "+ other.weight"]),
    "order": (Swapped, ["second.weight (4, 3)"]),
    "shape": (lambda: Plain(5), ["- first.weight (3, 2)", "+ first.weight (5, 2)"]),
    "dtype": (lambda: Plain().double(), ["- first.weight (3, 2) torch.float32", "torch.float64"]),
    "frozen": (lambda: Plain(frozen=True), ["+ first.weight (3, 2) torch.float32 frozen"]),
}


def check_mismatch(kind):
    build, expected = ODD[kind]
    model = build() if c10d.get_rank() == 1 else Plain()
    for wrapper in (DataParallelBucket, DataParallelNaive):
        with pytest.raises(MismatchError) as caught:
            wrapper(model, group=c10d.group.WORLD)
        message = str(caught.value)
        assert "rank 1 (+), ranks 0, 2 (-)" in message
        assert f"this is rank {c10d.get_rank()}" in message
        for part in expected:
            assert part in message, kind


def check_options():
    rank = c10d.get_rank()
    with pytest.raises(
        MismatchError, match=r"\+ wrapper=DataParallelBucket, op=sum, bucket_size=7"
    ):
        DataParallelBucket(Plain(), bucket_size=7 if rank == 2 else 8, group=c10d.group.WORLD)
    with pytest.raises(MismatchError, match=r"op=mean"):
        DataParallelNaive(Plain(), op="mean" if rank else "sum", group=c10d.group.WORLD)
    DataParallelNaive(Plain(), group=c10d.group.WORLD)  # and the group still works


def check_long():
    count = 60 if c10d.get_rank() else 3
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(count)]).to(torch.float64)
    with pytest.raises(MismatchError, match=r"… and [0-9]+ lines more"):
        DataParallelBucket(model, group=c10d.group.WORLD)


def test_every_rank_reports_the_odd_one():
    run_ranks(in_turn, 3, [*for_each(check_mismatch, product(ODD)), check_options, check_long])

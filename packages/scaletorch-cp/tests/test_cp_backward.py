"""Recomputation in backward attends by the batch of its forward, or raises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import ShardedSequences, apply_context_parallel

LENGTH, WIDTH = 12, 8
PACKED, OTHER = (0, 5, 12), (0, 4, 12)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.attend = Attend()
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return {"out": self.attend(x)}
        return {"out": checkpoint(self.attend, x, use_reentrant=self.reentrant)}


def _gradients(reentrant, then):
    """Return gradients of a forward inside PACKED, whose backward runs where `then` says."""
    world = c10d.group.WORLD
    torch.manual_seed(0)
    model = apply_context_parallel(Model(reentrant).double(), world, layout="zigzag")
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    sequences, other = (
        ShardedSequences(LENGTH, cu_seqlens=documents, group=world) for documents in (PACKED, OTHER)
    )
    part = x[:, sequences.positions()]
    with sequences.inside(model):
        loss = model(part)["out"].square().sum()
        if then == "inside":
            loss.backward()
    if then == "outside":
        loss.backward()
    if then == "other":
        with other.inside(model):
            loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def _compare():
    whole = _gradients(None, "inside")
    for reentrant in (None, True, False):
        for then in ("inside", "outside", "other"):
            if reentrant is None or then == "inside":
                for found, expected in zip(_gradients(reentrant, then), whole, strict=True):
                    torch.testing.assert_close(found, expected)
                continue
            with pytest.raises(StateError, match="runs inside of other sequences than its forward"):
                _gradients(reentrant, then)


def _interleaved():
    """Forwards and backwards of two batches in turns, inside and outside: all right."""
    world = c10d.group.WORLD
    torch.manual_seed(0)
    model = apply_context_parallel(Model(False).double(), world, layout="zigzag")
    x = torch.randn(2, LENGTH // 2, WIDTH, dtype=torch.float64, requires_grad=True)
    sequences = ShardedSequences(LENGTH, cu_seqlens=PACKED, group=world)
    with sequences.inside(model):
        one, two = (model(x)["out"].sum() for _ in range(2))
        two.backward()
        one.backward()
    model(x)["out"].sum().backward()
    with sequences.inside(model):
        model(x)["out"].sum().backward()


def _on_two():
    _compare()
    _interleaved()


def test_recomputation_meets_the_batch_of_its_forward():
    run_ranks(_compare, 1)
    run_ranks(_on_two, 2)

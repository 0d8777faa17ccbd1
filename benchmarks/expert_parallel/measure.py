"""Measurements of a block whose experts are sharded; every rank runs the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..harness.checks import check
from ..harness.costs import BOUNDS, DTYPES, RANKS, Figures, alone, measured
from ..harness.turns import Run
from .block import Block
from .ways import WAYS

SKEWS = {"balanced": 0.0, "skewed": 4.0}


@dataclass(frozen=True)
class Size:
    """A problem; tokens are each rank's."""

    hidden: int
    experts: int
    top_k: int
    tokens: int
    routing: str
    dtype: str
    shared: bool = False
    code: str = "loop"

    def formula(self, rows: int) -> int:
        """Return the bytes for `rows` rows sent to other ranks and back, forward and backward."""
        return 4 * rows * self.hidden * DTYPES[self.dtype].itemsize


def make(size: Size) -> Block:
    """Return the full block, the same on every rank."""
    torch.manual_seed(0)
    skew = SKEWS[size.routing]
    inner = 2 * size.hidden
    block = Block(size.experts, size.top_k, size.hidden, inner, skew, size.shared, size.code)
    return block.to(DTYPES[size.dtype])


def step(block: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the tokens' gradient, [T, H]."""
    x = x.detach().requires_grad_()
    out = block(x)
    out.backward(gradient)
    for parameter in block.parameters():
        parameter.grad = None
    return out.detach(), torch.as_tensor(x.grad)


def draw(size: Size) -> Tensor:
    """Return all ranks' tokens and the gradients of their outputs, [2, T, H]."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(2, RANKS * size.tokens, size.hidden, generator=generator)
    return drawn.to(DTYPES[size.dtype])


def prepare(size: Size) -> dict[str, Run]:
    """Return each way's step, after a check of its results."""
    x, gradient = draw(size)
    whole = make(size)
    in_one = partial(step, whole, x, gradient)
    own = partial(torch.chunk, chunks=RANKS)
    rank = dist.get_rank()
    expected, runs = [own(each)[rank] for each in in_one()], {}
    for name, divide in WAYS.items():
        block = divide(copy.deepcopy(whole))
        runs[name] = partial(step, block, own(x)[rank], own(gradient)[rank])
        check(name, runs[name](), expected, BOUNDS[size.dtype])
    return runs | alone(in_one)


def elsewhere(size: Size) -> int:
    """Return the number of rows that go to other ranks, each token once a rank."""
    rank = dist.get_rank()
    x = draw(size)[0].chunk(RANKS)[rank]
    chosen: list[Tensor] = []
    block = make(size)
    hook = block.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    with torch.no_grad():
        block(x)
    hook.remove()
    owners = chosen[0] * RANKS // size.experts
    return sum(int((owners == r).any(1).sum()) for r in range(RANKS) if r != rank)


def measure(size: Size, budget: float) -> tuple[dict[str, Figures], int]:
    """Measure every way on this rank for about `budget` seconds; also return formula bytes."""
    return measured(prepare(size), budget), size.formula(elsewhere(size))

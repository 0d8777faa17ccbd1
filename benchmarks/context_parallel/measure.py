"""Measurements of attention by every method on one rank; every rank runs the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from scaletorch.parallel.context_parallel import LAYOUTS, attention

from ..harness.checks import check
from ..harness.costs import DTYPES, RANKS, Figures, alone, figures
from ..harness.turns import Run

HEADS, HEAD_DIM = 8, 64
# One bfloat16 process is off by 2e-2 in dK and dV at 32,768 positions, a ring by half of that.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Size:
    """A problem: forward and backward, or forward only."""

    length: int
    dtype: str
    backward: bool

    @property
    def what(self) -> str:
        """Dtype and passes in words."""
        return f"{self.dtype}, {'forward and backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Way:
    """A division of the sequence and an attention method."""

    method: str
    layout: str

    def formula(self, size: Size) -> int:
        """Return the bytes that each rank sends by formula, for two ranks."""
        tensor = HEADS * size.length // RANKS * HEAD_DIM
        item, wide = DTYPES[size.dtype].itemsize, 4  # gradients travel in float32
        if self.method == "ulysses":  # q, k, v and the output, of which a rank keeps its heads
            forward, backward = 4 * item * tensor // RANKS, (item + 3 * wide) * tensor // RANKS
        else:  # k and v, in backward again with their gradients
            forward, backward = 2 * item * tensor, 2 * (item + wide) * tensor
        return forward + backward if size.backward else forward


WAYS = {
    "ring, zigzag": Way("ring", "zigzag"),
    "ring, contiguous": Way("ring", "contiguous"),
    "all_gather, zigzag": Way("all_gather", "zigzag"),
    "ulysses": Way("ulysses", "zigzag"),
}


def step(attend: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> list[Tensor]:
    """Return the output for [1, H, L, D] inputs, and the gradients of q, k and v."""
    if not backward:
        with torch.no_grad():
            return [attend(*inputs[:3])]
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    out.backward(inputs[3])
    return [out.detach(), *(torch.as_tensor(x.grad) for x in leaves)]


def prepare(size: Size) -> dict[str, Run]:
    """Return each way's step, after a check of its results."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, HEADS, size.length, HEAD_DIM
    whole = [torch.randn(shape, generator=generator).to(DTYPES[size.dtype]) for _ in range(4)]
    plain = partial(F.scaled_dot_product_attention, is_causal=True)
    in_one = partial(step, plain, whole, size.backward)
    expected, runs = in_one(), {}
    for name, way in WAYS.items():
        held = LAYOUTS[way.layout](size.length, RANKS).positions(dist.get_rank())
        own = [x[:, :, held].contiguous() for x in whole]
        attend = partial(attention, causal=True, layout=way.layout, method=way.method)
        runs[name] = partial(step, partial(attend, group=dist.group.WORLD), own, size.backward)
        check(name, runs[name](), [x[:, :, held] for x in expected], BOUNDS[size.dtype])
    return runs | alone(in_one)


def measure(size: Size, repeats: int) -> dict[str, Figures]:
    """Measure every way on this rank."""
    return figures(prepare(size), repeats)

"""Tiny models and layouts to plan and to train, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import torch

from scaletorch.dist.transport import ways
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.plan import Cut, Description, Layout, describe

SCHEDULES = (("1f1b", 1), ("afab", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2),
             ("zb_v", 2), ("dualpipe_v", 2))  # fmt: skip
SIZES = {
    "wide": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176},
    "large": {"vocab_size": 256, "hidden_size": 160, "intermediate_size": 440},  # several buckets
    "small": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
}


@dataclass(frozen=True)
class Case:
    """A model of a size and a way to train it."""

    family: str  # a size, and "mixture" behind it for one with experts
    layers: int
    tied: bool
    dtype: str
    length: int
    layout: Layout
    sum_item: int | None = None  # bytes of an element of summed gradients

    def __str__(self) -> str:
        at = self.layout
        return (
            f"{self.family} {self.layers} layers{' tied' * self.tied} {self.dtype} {at.grid} "
            f"{at.schedule}x{at.chunks} zero {at.zero} recompute {at.recompute} "
            f"sp {at.sequence_parallel} {at.micro_batches} x {at.micro_rows}"
            f"{f' summed in {self.sum_item} bytes' * bool(self.sum_item)}"
        )


def model_of(case: Case) -> Llama:
    """Return the plain model."""
    size, *mixture = case.family.split()
    sizes = {**SIZES[size], "num_layers": case.layers, "tie_embeddings": case.tied}
    model = Mixture(MixtureConfig(**sizes)) if mixture else Llama(LlamaConfig(**sizes))
    return model.to(getattr(torch, case.dtype))


def described(case: Case) -> Description:
    """Describe what a case trains, in its cut, with gloo: what that lacks is done another way."""
    return _described(replace(case, layout=Layout(Grid()), sum_item=None), case.layout.cut)


@cache
def _described(case: Case, cut: Cut) -> Description:
    real = ways.route
    with patch.object(ways, "route", lambda *of: replace(real(*of), backend="gloo")):
        return describe(lambda: model_of(case), case.length, cuts=[cut], kernels="cpu")


def drawn(seed: int, ranks: int) -> Iterator[Case]:
    """Yield cases without an end, most in stages; those with replicas may shard state over them."""
    random_ = random.Random(seed)
    grids = [grid for grid in legal_layouts(ranks) if grid.tp < 4]
    stages = [grid for grid in grids if grid.pp > 1]
    while True:
        grid = random_.choice((*stages, *stages, *grids))
        schedule, chunks = random_.choice(SCHEDULES) if grid.pp > 1 else ("1f1b", 1)
        if grid.pp * chunks > 8:
            continue
        zero = random_.choice((0, 1, 2)) if grid.cp * grid.dp > 1 else 0
        family = random_.choice(("large", "large mixture")) if zero else "wide"
        ep = random_.choice((1, 2, 4)) if family == "large mixture" else 1
        if grid.tp * grid.cp * grid.dp % ep == 0:
            grid = Grid(grid.tp, grid.cp, grid.pp, grid.dp, ep=ep)
        layout = Layout(
            grid, sequence_parallel=grid.tp > 1 and random_.random() < 0.5,
            recompute=random_.choice(("none", "full", "selective")), zero=zero, schedule=schedule,
            chunks=chunks, micro_rows=random_.choice((2, 3, 4)),
            micro_batches=random_.choice((1, 2, grid.pp + 1, 2 * grid.pp, 3 * grid.pp + 1)),
        )  # fmt: skip
        yield Case(family, 8, zero > 0 and random_.random() < 0.4, "float32", 64, layout)

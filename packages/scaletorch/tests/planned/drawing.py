"""Layouts and options, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pg_manager import Grid, legal_layouts
from scaletorch.plan import Layout

SCHEDULES = (("1f1b", 1), ("afab", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2),
             ("zb_v", 2), ("dualpipe_v", 2))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of a size and a way to train it."""

    family: str
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


def drawn_wide(seed: int, ranks: int) -> Iterator[Case]:
    """Yield cases whose activations are most of what ranks hold, without an end; most in stages."""
    random_ = random.Random(seed)
    grids = [grid for grid in legal_layouts(ranks) if grid.tp < 4]
    stages = [grid for grid in grids if grid.pp > 1]
    while True:
        grid = random_.choice((*stages, *stages, *grids))
        schedule, chunks = random_.choice(SCHEDULES) if grid.pp > 1 else ("1f1b", 1)
        if grid.pp * chunks > 8:
            continue
        layout = Layout(
            grid,
            sequence_parallel=grid.tp > 1 and random_.random() < 0.5,
            recompute=random_.choice(("none", "full", "selective")),
            schedule=schedule,
            chunks=chunks,
            micro_rows=random_.choice((2, 3, 4)),
            micro_batches=random_.choice((1, 2, grid.pp + 1, 2 * grid.pp, 3 * grid.pp + 1)),
        )
        yield Case("wide", 8, False, "float32", 64, layout)


def drawn_shared(seed: int, ranks: int) -> Iterator[Case]:
    """Yield such cases with an optimizer's state, or gradients too, in shards; of more models."""
    random_, models = random.Random(seed), random.Random(seed)
    for case in drawn_wide(seed, ranks):
        grid = case.layout.grid
        if grid.cp * grid.dp > 1:
            family, tied = models.choice(("large", "large mixture")), models.random() < 0.4
            if family == "large mixture":
                grid = _with_experts(models, grid)
            layout = replace(case.layout, grid=grid, zero=random_.choice((1, 2)))
            yield replace(case, family=family, tied=tied, layout=layout)


def _with_experts(random_: random.Random, grid: Grid) -> Grid:
    try:
        return Grid(grid.tp, grid.cp, grid.pp, grid.dp, ep=random_.choice((1, 2, 4)))
    except InvalidArgumentError:
        return grid

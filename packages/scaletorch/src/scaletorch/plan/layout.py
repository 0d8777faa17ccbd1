"""A layout: the grid, and the options that decide memory and communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from ..parallel.pg_manager import Grid
from ..parallel.pipeline_parallel import interleaved_1f1b, looped_breadth_first
from .description import Cut

Recompute = Literal["none", "selective", "full", "offload"]
# Schedules with any number of chunks (`CHUNKS` has the default); V-shaped ones have two.
LOOPED = {"interleaved_1f1b": interleaved_1f1b, "looped_bfs": looped_breadth_first}
V_SHAPED = ("zb_v", "dualpipe_v")
_RECOMPUTE = {"none": False, "full": True}  # `parallelize` takes the other words as they are
CHUNKS = dict.fromkeys((*LOOPED, *V_SHAPED), 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """A parallel layout and its training options."""

    grid: Grid
    sequence_parallel: bool = False  # as for `parallelize`
    recompute: Recompute = "none"  # "full" is `recompute=True` of `parallelize`
    zero: int = 0  # ZeRO stage over cp x dp, 0 to 3
    schedule: str = "1f1b"  # pipeline schedule, a name of `SCHEDULES`
    chunks: int = 1  # stages on each pipeline rank
    cp_method: str = "ring"  # attention method of context parallelism
    micro_rows: int = 1  # rows of a micro-batch
    micro_batches: int = 1  # of a step on each data-parallel rank

    @property
    def cut(self) -> Cut:
        """The cut of its layers."""
        grid = self.grid
        return cut_of(
            grid.tp, grid.cp, grid.ep, self.sequence_parallel and grid.tp > 1,
            self.cp_method if grid.cp > 1 else "", self.recompute == "selective",
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `parallelize`; `zero` is not one, it is for `shard_optimizer`."""
        chunked = LOOPED.get(self.schedule)
        return {
            "sequence_parallel": self.sequence_parallel,
            "recompute": _RECOMPUTE.get(self.recompute, self.recompute),
            "schedule": partial(chunked, num_chunks=self.chunks) if chunked else self.schedule,
            "cp_method": self.cp_method,
        }


@cache
def cut_of(tp: int, cp: int, ep: int, sequence: bool, method: str, selective: bool) -> Cut:
    """Return a cut; equal arguments give the same object, which makes dict look-ups fast."""
    return Cut(tp, cp, ep, sequence, method, selective)

"""What is shown of a plan, as data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...parallel.pg_manager import Grid, layout_name
from ...parallel.pipeline_parallel import Timeline
from ..clusters import Cluster
from ..estimate import Estimate
from ..layout import Layout

GIB, MIB = 2**30, 2**20
SORTS = ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
AXES = ("tp", "cp", "ep", "pp", "dp")
_AXIS_OF = {"cp_dp": "dp", "edp": "dp", "etp": "tp"}  # under which heading an axis is shown


@dataclass(frozen=True, slots=True)
class Shown:
    """A plan as tables and pictures take it.

    Attributes:
        name: Of the model.
        length: Tokens of a sequence.
        rows: Sequences of a global batch.
        cluster: What it would run on.
        estimates: The best first.
        fitting: How many of them fit, which are the first.
        refused: Layouts that cannot be, as text, and why.
        lines: Returns what the fullest rank of a layout holds, line by line: a name and bytes.
        timeline: Returns when the ranks of a layout's pipeline compute; None if that is not known.
        notes: What is assumed, a sentence each.
    """

    name: str
    length: int
    rows: int
    cluster: Cluster
    estimates: Sequence[Estimate]
    fitting: int
    refused: Sequence[tuple[str, str]] = ()
    lines: Callable[[Layout], Sequence[tuple[str, int]]] | None = None
    timeline: Callable[[Layout], Timeline] | None = None
    notes: Sequence[str] = ()

    def counted(self, into: str = "") -> str:
        """Return how many layouts fit, and how many do not."""
        return f"{self.fitting} layouts fit{into}; {len(self.refused)} do not, or cannot be"

    def fits(self, estimate: Estimate) -> bool:
        """Return whether the fullest rank has memory enough."""
        return estimate.peak <= self.cluster.device.memory

    def tokens_per_second(self, estimate: Estimate) -> float:
        """Return tokens of all ranks a second; 0 if the time is not known."""
        return self.rows * self.length / estimate.time.step if estimate.time else 0.0


def sizes_of(layout: Layout) -> str:
    """Return the sizes of a layout, `DPxPPxCPxTP` and what experts have of their own."""
    return layout_name(layout.grid)


def options_of(layout: Layout) -> list[str]:
    """Return the options that matter to a layout, a word or two each."""
    grid = layout.grid
    said = {
        "sp": layout.sequence_parallel and grid.tp > 1,
        layout.cp_method: grid.cp > 1,
        f"zero {layout.zero}": layout.zero > 0,
        f"recompute {layout.recompute}": layout.recompute != "none",
        layout.schedule: grid.pp > 1,
        f"{layout.chunks} chunks": layout.chunks > 1,
        f"{layout.micro_batches} x {_rows(layout.micro_rows)}": True,
    }
    return [word for word, matters in said.items() if matters]


def sent_by_axis(estimate: Estimate) -> dict[str, int]:
    """Return the bytes that a rank sends over each axis, of the pipeline rank that sends most."""
    most = dict.fromkeys(AXES, 0)
    for traffic in estimate.traffic:
        own: Counter[str] = Counter()
        for sent in traffic:
            own[_AXIS_OF.get(sent.axis, sent.axis)] += sent.bytes
        most = {axis: max(size, own[axis]) for axis, size in most.items()}
    return most


def grouped(refused: Sequence[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield reasons, the most frequent first: how many layouts, an example, and why not that one.

    Reasons are the same if they differ in numbers alone.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for layout, why in refused:
        found.setdefault(re.sub(r"\d+(\.\d+)?", "0", why), []).append((layout, why))
    for each in sorted(found.values(), key=len, reverse=True):
        yield len(each), *each[0]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def shortened(layout: Layout) -> Layout:
    """Return a layout with as few micro-batches as show how its pipeline repeats itself."""
    return replace(layout, micro_batches=min(layout.micro_batches, 2 * layout.grid.pp))


def crossing(grid: Grid, cluster: Cluster, axis: str) -> str:
    """Return in words whether an axis leaves the nodes."""
    size = cluster.links[0].ranks if cluster.links else 1
    spanned = {rank // size for rank in grid.group(axis, 0)}
    return "inside a node" if len(spanned) == 1 else f"over {len(spanned)} nodes"

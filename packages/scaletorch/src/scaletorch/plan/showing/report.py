"""A plan in sentences and tables, which the terminal and the page both show."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...parallel.pg_manager import Grid, count_communicators, layout_name
from ..clusters import Cluster
from ..estimate import Estimate
from ..layout import Layout
from ..options import Refused
from ..search import Plan
from ..units import in_bytes, in_seconds, in_short

GIB, MIB, WIDTH = 2**30, 2**20, 120
SORTS = ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
SHORT = ("GiB param", "grad", "optim", "activ", "working", "buffers")
AXES = ("tp", "cp", "ep", "pp", "dp")
REASONS = 6  # that are told apart
_AXIS_OF = {"cp_dp": "dp", "edp": "dp", "etp": "tp"}  # the heading of an axis


class Table(NamedTuple):
    """Rows of cells under their heads; the first `words` columns are text, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def text(self) -> Iterator[str]:
        """Yield the lines of the table."""
        wide = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        if self.title:
            yield self.title
        for cells in (self.heads, *self.rows):
            words = (
                f"{cell:<{size}}" if at < self.words else f"{cell:>{size}}"
                for at, (cell, size) in enumerate(zip(cells, wide, strict=True))
            )
            yield "  ".join(words).rstrip()


def table(plan: Plan, top: int = 10, notes: Sequence[str] = ()) -> str:
    """Return the plan as text.

    Args:
        plan: The plan.
        top: Layouts in the table.
        notes: Assumptions, a sentence each.
    """
    said = [*wrapped(heading(plan)), ""]
    if listed := plan.top(top):
        shared = common(listed)
        said += [f"all of these: {', '.join(shared)}"] * bool(shared)
        said += [*ranking(plan, listed, shared).text(), "", *wrapped(below(plan, listed)), ""]
        said += [*holding(listed).text(), ""]
    said += wrapped([*refusals(plan), *(f"note: {note}" for note in notes)])
    return "\n".join(said).rstrip()


def explained(plan: Plan, estimate: Estimate) -> str:
    """Return a layout in full: its pipeline's ranks, the fullest line by line, its messages."""
    said = [*summary(plan, estimate)]
    for each in details(plan, estimate):
        said += ["", *each.text()]
    return "\n".join(said)


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield sentences in lines that fit a terminal."""
    for each in lines:
        yield from textwrap.wrap(each, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def heading(plan: Plan) -> list[str]:
    """Return what is planned, and how many layouts fit."""
    device, known = plan.cluster.device, plan.description
    return [
        f"{known.name}: {plan.rows} rows of {known.length} tokens a step on {plan.cluster.ranks} x "
        f"{device.name}, {in_bytes(device.memory)} each",
        f"{len(plan.fitting)} layouts fit; {len(plan.illegal) + len(plan.tried)} do not, or cannot "
        "be",
    ]


def ranking(plan: Plan, listed: Sequence[Estimate], shared: Sequence[str]) -> Table:
    """Return the table of layouts, the best first."""
    timed = listed[0].time is not None
    rows = []
    for at, each in enumerate(listed, 1):
        words = ", ".join(word for word in words_of(each.layout) if word not in shared)
        mark = " " if fits(plan, each) else "!"
        rows.append([str(at), layout_name(each.layout.grid), words, gib(each.peak) + mark])
        if each.time is not None:
            rows[-1] += [f"{each.time.bubble:.1%}", in_seconds(each.time.step)]
            rows[-1] += [in_short(tokens_per_second(plan, each))]
    heads = ["", "DPxPPxCPxTP", "options", "GiB ", *["bubble", "step", "tokens/s"] * timed]
    return Table("", heads, rows, words=3)


def holding(listed: Sequence[Estimate]) -> Table:
    """Return the table of what the fullest rank holds, and of what a rank sends in a step."""
    sent = [sent_by_axis(each) for each in listed]
    groups = any(each.communicators for each in listed)
    axes = [axis for axis in AXES if any(own[axis] for own in sent)]
    rows = []
    for at, (each, own) in enumerate(zip(listed, sent, strict=True), 1):
        memory = each.memory[each.fullest]
        rows.append([str(at), layout_name(each.layout.grid)])
        rows[-1] += [gib(getattr(memory, sort)) for sort in SORTS]
        rows[-1] += [gib(each.communicators)] * groups
        sizes = (sum(own.values()), *(own[axis] for axis in axes))
        rows[-1] += [f"{size / MIB:,.0f}" for size in sizes]
    heads = ["", "DPxPPxCPxTP", *SHORT, *["groups"] * groups, "MiB sent", *axes]
    return Table("", heads, rows, words=2)


def below(plan: Plan, listed: Sequence[Estimate]) -> Iterator[str]:
    """Yield what is to be said of the table of layouts."""
    memory = in_bytes(plan.cluster.device.memory)
    if not plan.fitting:
        cures = "take more ranks, --recompute full, --zero 3 or --micro-rows 1"
        yield f"none fits in {memory}: {cures}"
    elif not all(fits(plan, each) for each in listed):
        yield f"! is more than {memory}"
    if time := listed[0].time:
        span = f"{in_seconds(time.low)} to {in_seconds(time.high)}"
        yield f"steps are estimates: the first takes {span}"


def refusals(plan: Plan) -> Iterator[str]:
    """Yield why layouts are refused, the most frequent reasons first."""
    reasons = grouped(plan.refused)
    for count, example, why in reasons[:REASONS]:
        others = f" and {count - 1} like it" if count > 1 else ""
        yield f"refused: {example}{others}: {why}"
    if more := len(reasons[REASONS:]):
        left = sum(count for count, _, _ in reasons[REASONS:])
        yield f"refused: {left} others for {more} other {'reason' if more == 1 else 'reasons'}"


def summary(plan: Plan, estimate: Estimate) -> Iterator[str]:
    """Yield a layout, whether it fits and how long its step takes."""
    layout, room = estimate.layout, in_bytes(plan.cluster.device.memory)
    verdict = "fits in" if fits(plan, estimate) else "does not fit in"
    yield f"DP x PP x CP x TP {layout_name(layout.grid)}, {', '.join(words_of(layout))}"
    yield f"{in_bytes(estimate.peak)} on the fullest rank: {verdict} {room}"
    if estimate.communicators:
        count, size = count_communicators(layout.grid), in_bytes(estimate.communicators)
        yield f"communicators of each rank: {count}, which hold {size}"
    if time := estimate.time:
        speed = in_short(tokens_per_second(plan, estimate))
        span = f"{in_seconds(time.low)} to {in_seconds(time.high)}"
        yield f"step {in_seconds(time.step)} ({span}), {speed} tokens/s"
        spent = f"computing {in_seconds(time.computing)}, update {in_seconds(time.update)}"
        yield f"  {spent}, bubble {time.bubble:.1%}"
        for word, seconds in (("waits for", time.exposed), ("hides", time.hidden)):
            each = [f"{axis} {in_seconds(own)}" for axis, own in seconds.items() if own]
            if each:
                yield f"  {word} {', '.join(each)}"


def details(plan: Plan, estimate: Estimate) -> Iterator[Table]:
    """Yield the tables of a layout: memory, groups, messages."""
    grid, most = estimate.layout.grid, estimate.fullest
    rows = [
        [f"{rank}{' fullest' if rank == most and grid.pp > 1 else ''}"]
        + [gib(getattr(own, sort)) for sort in (*SORTS, "total")]
        for rank, own in enumerate(estimate.memory)
    ]
    yield Table("memory of each rank of the pipeline", ("GiB of rank", *SORTS, "total"), rows)
    lines = [
        [f"{line.part}: {line.what}", f"{line.bytes:,}"]
        for line in plan.explain(estimate.layout, most)
    ]
    yield Table(f"pipeline rank {most} in bytes", ("", "bytes"), lines)
    places = [
        [f"{axis} {size}", crossing(grid, plan.cluster, axis)]
        for axis in AXES
        if (size := grid.size(axis)) > 1
    ]
    if places:
        yield Table("where ranks meet", ("axis", "groups lie"), places, words=2)
    sent = max(estimate.traffic, key=lambda own: sum(each.bytes for each in own), default=())
    calls = [[e.axis, e.operation, f"{e.count:,}", f"{e.bytes:,}"] for e in sent if e.count]
    if calls:
        heads = ("axis", "collective", "calls", "bytes")
        yield Table("sent by a rank in a step", heads, calls, words=2)


def words_of(layout: Layout) -> list[str]:
    """Return the options that matter to a layout, a word or two each."""
    grid, rows = layout.grid, layout.micro_rows
    said = {
        "sp": layout.sequence_parallel and grid.tp > 1,
        layout.cp_method: grid.cp > 1,
        f"zero {layout.zero}": layout.zero > 0,
        f"recompute {layout.recompute}": layout.recompute != "none",
        layout.schedule: grid.pp > 1,
        f"{layout.chunks} chunks": layout.chunks > 1,
        f"{layout.micro_batches} x {rows} row{'s' * (rows > 1)}": True,
    }
    return [word for word, matters in said.items() if matters]


def common(listed: Sequence[Estimate]) -> list[str]:
    """Return the options that all layouts have, if they are several."""
    options = [words_of(each.layout) for each in listed]
    found = [word for word in options[0] if all(word in own for own in options)]
    return found if len(listed) > 1 else []


def sent_by_axis(estimate: Estimate) -> dict[str, int]:
    """Return the bytes that a rank sends over each axis, of the pipeline rank that sends most."""
    most = dict.fromkeys(AXES, 0)
    for traffic in estimate.traffic:
        own: Counter[str] = Counter()
        for sent in traffic:
            own[_AXIS_OF.get(sent.axis, sent.axis)] += sent.bytes
        most = {axis: max(size, own[axis]) for axis, size in most.items()}
    return most


def grouped(refused: Iterable[Refused]) -> list[tuple[int, str, str]]:
    """Return reasons, the most frequent first: how many layouts, an example, and its reason.

    Reasons are the same if they differ in numbers alone.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for each in refused:
        pair = named(each), each.why
        found.setdefault(re.sub(r"\d+(\.\d+)?", "0", each.why), []).append(pair)
    ordered = sorted(found.values(), key=len, reverse=True)
    return [(len(each), *each[0]) for each in ordered]


def named(refused: Refused) -> str:
    """Return the name of a grid or a layout that is refused."""
    name, layout = layout_name(refused.grid), refused.layout
    if layout is None:
        return name
    pipeline = f", {layout.schedule}" * (refused.grid.pp > 1)
    return f"{name}{pipeline}, micro-rows {layout.micro_rows}"


def crossing(grid: Grid, cluster: Cluster, axis: str) -> str:
    """Return in words whether an axis leaves the nodes."""
    size = cluster.links[0].ranks if cluster.links else 1
    spanned = {rank // size for rank in grid.group(axis, 0)}
    return "inside a node" if len(spanned) == 1 else f"over {len(spanned)} nodes"


def fits(plan: Plan, estimate: Estimate) -> bool:
    """Return whether the fullest rank has memory enough."""
    return estimate.peak <= plan.cluster.device.memory


def tokens_per_second(plan: Plan, estimate: Estimate) -> float:
    """Return tokens of all ranks a second; 0 if the time is not known."""
    tokens = plan.rows * plan.description.length
    return tokens / estimate.time.step if estimate.time else 0.0


def gib(size: float) -> str:
    """Return GiB with two decimals, if there is room."""
    return f"{size / GIB:.2f}" if size < 100 * GIB else f"{size / GIB:.0f}"

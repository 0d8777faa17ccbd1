"""A plan as text: a table, a layout in full, and both on an HTML page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape

from ..parallel.pg_manager import Grid, count_communicators, layout_name
from ..parallel.pipeline_parallel.drawing import to_text
from .clusters import Cluster
from .estimate import Estimate
from .layout import Layout
from .options import Refused
from .search import Plan
from .timing import timeline
from .units import in_bytes, in_seconds, in_short

GIB, WIDTH = 2**30, 120
SORTS = ("parameters", "gradients", "optimizer", "activations", "working", "buffers", "total")
REASONS = 6  # refusal reasons in the table
IN_FULL = 3  # layouts that the page shows in full
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} pre {{ overflow-x: auto; }}</style>
<body>
{body}
</body>
</html>
"""


def table(plan: Plan, top: int = 10, notes: Sequence[str] = ()) -> str:
    """Return the plan as a table.

    Args:
        plan: The plan.
        top: Number of layouts in the table.
        notes: Assumptions, one sentence each.
    """
    lines = [*_wrapped(_heading(plan)), ""]
    if listed := plan.top(top):
        shared = _common(listed)
        lines += [f"all of these: {', '.join(shared)}"] * bool(shared)
        lines += [*_ranking(plan, listed, shared), "", *_wrapped(_below(plan, listed)), ""]
    lines += _wrapped([*_refusals(plan), *(f"note: {note}" for note in notes)])
    return "\n".join(lines).rstrip()


def explained(plan: Plan, estimate: Estimate) -> str:
    """Return a layout in full: its step, the memory of each rank and its pipeline timeline."""
    grid, fullest = estimate.layout.grid, estimate.fullest
    lines = [*_summary(plan, estimate), ""]
    rows = [
        [f"{rank}{' fullest' if rank == fullest and grid.pp > 1 else ''}"]
        + [_gib(getattr(own, sort)) for sort in SORTS]
        for rank, own in enumerate(estimate.memory)
    ]
    lines += ["memory of each rank of the pipeline", *_columns(("GiB of rank", *SORTS), rows, 1)]
    if grid.pp > 1:
        # Just enough micro-batches to show the steady state of the pipeline.
        batches = min(estimate.layout.micro_batches, 2 * grid.pp)
        few = replace(estimate.layout, micro_batches=batches)
        drawn = to_text(timeline(plan.description, few, plan.cluster), WIDTH)
        lines += ["", f"the pipeline, of {batches} micro-batches", drawn]
    return "\n".join(lines)


def page(plan: Plan, top: int = 10, notes: Sequence[str] = ()) -> str:
    """Return a plan as an HTML page without external resources and JavaScript.

    Args:
        plan: The plan.
        top: Number of layouts in the table; the first three are shown in full.
        notes: Assumptions, one sentence each.
    """
    title = f"Plan for {plan.description.name} on {plan.cluster.ranks} x {plan.cluster.device.name}"
    notes = [*notes, f"figures of the device: {plan.cluster.device.source or 'as given'}"]
    texts = [table(plan, top, notes), *(explained(plan, e) for e in plan.top(IN_FULL))]
    body = "\n".join(f"<pre>{escape(text)}</pre>" for text in texts)
    return PAGE.format(title=escape(title), body=body)


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Yield the lines of a table; the first `words` columns are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows):
        padded = (
            f"{cell:<{width}}" if at < words else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield sentences wrapped to the width of the output."""
    for each in lines:
        yield from textwrap.wrap(each, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _heading(plan: Plan) -> list[str]:
    """Return the title lines: the job, and the number of layouts that fit."""
    device, known = plan.cluster.device, plan.description
    return [
        f"{known.name}: {plan.rows} rows of {known.length} tokens a step on {plan.cluster.ranks} x "
        f"{device.name}, {in_bytes(device.memory)} each",
        f"{len(plan.fitting)} layouts fit; {len(plan.illegal) + len(plan.tried)} do not, or cannot "
        "be",
    ]


def _ranking(plan: Plan, listed: Sequence[Estimate], shared: Sequence[str]) -> Iterator[str]:
    """Yield the table of layouts, the best first."""
    rows = []
    for at, each in enumerate(listed, 1):
        words = ", ".join(word for word in words_of(each.layout) if word not in shared)
        mark = " " if fits(plan, each) else "!"
        rows.append([str(at), layout_name(each.layout.grid), words, _gib(each.peak) + mark])
        rows[-1] += [f"{each.time.bubble:.1%}", in_seconds(each.time.step), _speed(plan, each)]
    heads = ["", "DPxPPxCPxTP", "options", "GiB ", "bubble", "step", "tokens/s"]
    return _columns(heads, rows, 3)


def _below(plan: Plan, listed: Sequence[Estimate]) -> Iterator[str]:
    """Yield remarks on the table of layouts."""
    memory = in_bytes(plan.cluster.device.memory)
    if not plan.fitting:
        cures = "take more ranks, --recompute full, --zero 3 or --micro-rows 1"
        yield f"none fits in {memory}: {cures}"
    elif not all(fits(plan, each) for each in listed):
        yield f"! is more than {memory}"
    time = listed[0].time
    span = f"{in_seconds(time.low)} to {in_seconds(time.high)}"
    yield f"steps are estimates: the first takes {span}"


def _refusals(plan: Plan) -> Iterator[str]:
    """Yield the reasons for refused layouts, most frequent first."""
    reasons = grouped(plan.refused)
    for count, example, why in reasons[:REASONS]:
        others = f" and {count - 1} like it" if count > 1 else ""
        yield f"refused: {example}{others}: {why}"
    if more := len(reasons[REASONS:]):
        left = sum(count for count, _, _ in reasons[REASONS:])
        yield f"refused: {left} others for {more} other {'reason' if more == 1 else 'reasons'}"


def _summary(plan: Plan, estimate: Estimate) -> Iterator[str]:
    """Yield a layout's memory verdict, step time, and the axes that cross nodes."""
    layout, room = estimate.layout, in_bytes(plan.cluster.device.memory)
    verdict = "fits in" if fits(plan, estimate) else "does not fit in"
    yield f"DP x PP x CP x TP {layout_name(layout.grid)}, {', '.join(words_of(layout))}"
    yield f"{in_bytes(estimate.peak)} on the fullest rank: {verdict} {room}"
    if estimate.communicators:
        count, size = count_communicators(layout.grid), in_bytes(estimate.communicators)
        yield f"communicators of each rank: {count}, which hold {size}"
    time = estimate.time
    span = f"{in_seconds(time.low)} to {in_seconds(time.high)}"
    yield f"step {in_seconds(time.step)} ({span}), {_speed(plan, estimate)} tokens/s"
    spent = f"computing {in_seconds(time.computing)}, update {in_seconds(time.update)}"
    yield f"  {spent}, bubble {time.bubble:.1%}"
    for word, seconds in (("waits for", time.exposed), ("hides", time.hidden)):
        each = [f"{axis} {in_seconds(own)}" for axis, own in seconds.items() if own]
        if each:
            yield f"  {word} {', '.join(each)}"
    places = [
        f"{axis} {layout.grid.size(axis)} {_crossing(layout.grid, plan.cluster, axis)}"
        for axis in ("tp", "cp", "ep", "pp", "dp")
        if layout.grid.size(axis) > 1
    ]
    if places:
        yield f"groups: {', '.join(places)}"


def words_of(layout: Layout) -> list[str]:
    """Return the options that matter for a layout, one or two words each."""
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


def _common(listed: Sequence[Estimate]) -> list[str]:
    """Return the options that all listed layouts share; none for a single layout."""
    options = [words_of(each.layout) for each in listed]
    found = [word for word in options[0] if all(word in own for own in options)]
    return found if len(listed) > 1 else []


def grouped(refused: Iterable[Refused]) -> list[tuple[int, str, str]]:
    """Return (number of layouts, an example, its reason) by reason, most frequent first.

    Reasons that differ only in numbers count as one.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for each in refused:
        pair = named(each), each.why
        found.setdefault(re.sub(r"\d+(\.\d+)?", "0", each.why), []).append(pair)
    ordered = sorted(found.values(), key=len, reverse=True)
    return [(len(each), *each[0]) for each in ordered]


def named(refused: Refused) -> str:
    """Return the name of a refused grid or layout."""
    name, layout = layout_name(refused.grid), refused.layout
    if layout is None:
        return name
    pipeline = f", {layout.schedule}" * (refused.grid.pp > 1)
    return f"{name}{pipeline}, micro-rows {layout.micro_rows}"


def _crossing(grid: Grid, cluster: Cluster, axis: str) -> str:
    """Return in words whether an axis stays inside a node."""
    size = cluster.links[0].ranks if cluster.links else 1
    spanned = {rank // size for rank in grid.group(axis, 0)}
    return "inside a node" if len(spanned) == 1 else f"over {len(spanned)} nodes"


def fits(plan: Plan, estimate: Estimate) -> bool:
    """Return whether the fullest rank has enough memory."""
    return estimate.peak <= plan.cluster.device.memory


def _speed(plan: Plan, estimate: Estimate) -> str:
    """Return tokens a second over all ranks; "any" if the step takes no time."""
    tokens, step = plan.rows * plan.description.length, estimate.time.step
    return in_short(tokens / step) if step else "any"


def _gib(size: float) -> str:
    """Return GiB with two decimals, or none from 100 GiB on."""
    return f"{size / GIB:.2f}" if size < 100 * GIB else f"{size / GIB:.0f}"

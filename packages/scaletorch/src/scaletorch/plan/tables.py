"""A plan as text: a table, a layout in full, and both on an HTML page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ..parallel.pg_manager import layout_name
from .description import Layout
from .estimate import Estimate, in_bytes, in_seconds, in_short
from .search import Plan, Refused

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


def table(plan: Plan, top: int = 10) -> str:
    """Return the plan as a table of the `top` best layouts."""
    device, known = plan.cluster.device, plan.description
    memory = in_bytes(device.memory)
    head = [
        f"{known.name}: {plan.rows} rows of {known.length} tokens a step on {plan.cluster.ranks} x "
        f"{device.name}, {memory} each",
        f"{len(plan.legal)} legal layouts; {len(plan.illegal)} grids are refused",
    ]
    ranking, foot = list[str](), list[str]()
    refused: Sequence[Refused] = plan.illegal
    if listed := plan.top(top):
        ranking = ["", *_ranking(plan, listed)]
        if not fits(plan, listed[0]):
            refused = plan.refused
            cures = "take more ranks, --recompute full, --zero 3 or --micro-rows 1"
            foot.append(f"! no layout fits in {memory}: {cures}")
        low, high = in_seconds(listed[0].time.low), in_seconds(listed[0].time.high)
        foot += [f"steps are estimates: the first takes {low} to {high}", ""]
    elif not plan.illegal:
        foot.append(
            "no layout is possible: dp x pp x cp x tp must be the number of ranks, and ep must "
            "divide dp x cp x tp and the experts"
        )
    foot += _refusals(refused)
    return "\n".join([*_wrapped(head), *ranking, "", *_wrapped(foot)]).rstrip()


def explained(plan: Plan, estimate: Estimate) -> str:
    """Return a layout in full: what its step takes, and the memory of each rank."""
    layout, time, room = estimate.layout, estimate.time, in_bytes(plan.cluster.device.memory)
    verdict = "fits in" if fits(plan, estimate) else "does not fit in"
    low, high = in_seconds(time.low), in_seconds(time.high)
    lines = [
        f"DP x PP x CP x TP {layout_name(layout.grid)}, {', '.join(words_of(layout))}",
        f"{in_bytes(estimate.peak)} on the fullest rank, {in_bytes(estimate.communicators)} of it "
        f"communicators: {verdict} {room}",
        f"step {in_seconds(time.step)} ({low} to {high}), {_speed(plan, estimate)} tokens/s",
        f"  computing {in_seconds(time.computing)}, update {in_seconds(time.update)}, bubble "
        f"{time.bubble:.1%}",
    ]
    for word, seconds in (("waits for", time.exposed), ("hides", time.hidden)):
        if axes := [f"{axis} {in_seconds(spent)}" for axis, spent in seconds.items() if spent]:
            lines.append(f"  {word} {', '.join(axes)}")
    rows = [
        [str(rank), *(_gib(getattr(held, sort)) for sort in SORTS)]
        for rank, held in enumerate(estimate.memory)
    ]
    return "\n".join([*lines, "", *_columns(("GiB of rank", *SORTS), rows, 1)])


def page(plan: Plan, top: int = 10) -> str:
    """Return a plan as an HTML page without external resources and JavaScript.

    It has the table of the `top` best layouts, the first three in full, and the source of the
    device's figures.
    """
    title = f"Plan for {plan.description.name} on {plan.cluster.ranks} x {plan.cluster.device.name}"
    texts = [table(plan, top), *(explained(plan, e) for e in plan.top(IN_FULL))]
    texts.append(f"figures of the device: {plan.cluster.device.source or 'as given'}")
    body = "\n".join(f"<pre>{escape(text)}</pre>" for text in texts)
    return PAGE.format(title=escape(title), body=body)


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Yield the lines of a table; the first `words` columns are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows):
        padded = (
            f"{cell:<{width}}" if column < words else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield sentences wrapped to the width of the output."""
    for line in lines:
        wrapped = textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        yield from wrapped or [""]


def _ranking(plan: Plan, listed: Sequence[Estimate]) -> Iterator[str]:
    """Yield the table of layouts, the best first; "!" marks those that do not fit."""
    rows = []
    for number, each in enumerate(listed, 1):
        mark = " " if fits(plan, each) else "!"
        rows.append([
            str(number), layout_name(each.layout.grid), ", ".join(words_of(each.layout)),
            _gib(each.peak) + mark, f"{each.time.bubble:.1%}", in_seconds(each.time.step),
            _speed(plan, each),
        ])  # fmt: skip
    heads = ["", "DPxPPxCPxTP", "options", "GiB ", "bubble", "step", "tokens/s"]
    return _columns(heads, rows, 3)


def _refusals(refused: Sequence[Refused]) -> Iterator[str]:
    """Yield the reasons for refusals, up to their numbers, with an example; most frequent first."""
    alike: dict[str, list[Refused]] = {}
    for each in refused:
        alike.setdefault(re.sub(r"\d+(\.\d+)?", "0", each.why), []).append(each)
    reasons = sorted(alike.values(), key=len, reverse=True)
    for first, *others in reasons[:REASONS]:
        more = f" and {len(others)} like it" if others else ""
        yield f"refused: {named(first)}{more}: {first.why}"
    if left := sum(map(len, reasons[REASONS:])):
        yield f"refused: {left} others for other reasons"


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


def named(refused: Refused) -> str:
    """Return the name of a refused grid, or of a layout with its options."""
    options = words_of(refused.layout) if refused.layout else []
    return ", ".join([layout_name(refused.grid), *options])


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

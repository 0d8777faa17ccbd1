"""A plan as one HTML file: no server, nothing fetched, readable without JavaScript."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ...parallel.pipeline_parallel.drawing import to_text
from ..estimate import Estimate
from ..units import in_bytes, in_seconds, in_short
from .columns import LEFT, Column, common, gib, held, ranked
from .shown import (
    AXES,
    SORTS,
    Shown,
    crossing,
    grouped,
    options_of,
    sent_by_axis,
    shortened,
    sizes_of,
)
from .style import STYLE

DRAWN = 3  # layouts in full
Cells = Iterable[tuple[str, str]]  # a class and what stands there


def page(shown: Shown, top: int = 10) -> str:
    """Return a plan as an HTML page.

    Args:
        shown: The plan.
        top: Layouts in the table; the first three are shown in full.
    """
    title = f"Plan for {shown.name} on {shown.cluster.ranks} x {shown.cluster.device.name}"
    listed = shown.estimates[:top]
    body = [f"<h1>{escape(title)}</h1>", *_opening(shown), *_best(shown)]
    body += [*_ranking(shown, listed)] if listed else []
    for place, estimate in enumerate(listed[:DRAWN]):
        body += _layout(shown, estimate, place)
    body += [*_refused(shown), *_notes(shown)]
    return "\n".join([
        "<!doctype html>", '<html lang="en">', '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
        "<body>", *body, "</body>", "</html>", "",
    ])  # fmt: skip


def _opening(shown: Shown) -> Iterator[str]:
    memory = in_bytes(shown.cluster.device.memory)
    yield (
        f'<p class="pale">{shown.rows} sequences of {shown.length} tokens a step. '
        f"{shown.counted(f' in {memory} a device')}.</p>"
    )


def _best(shown: Shown) -> Iterator[str]:
    """Yield the first layout in figures."""
    if not shown.estimates:
        yield '<p class="bad">No layout is legal: see below for what is wrong with each.</p>'
        return
    best = shown.estimates[0]
    if not shown.fits(best):
        yield '<p class="bad">None fits: the first needs the least memory.</p>'
    figures = {
        "DP x PP x CP x TP": sizes_of(best.layout),
        "on the fullest rank": in_bytes(best.peak),
        "sent by a rank": in_bytes(sum(sent_by_axis(best).values())),
    }
    if best.time is not None:
        span = f"{in_seconds(best.time.low)} to {in_seconds(best.time.high)}"
        figures["a step, estimated"] = f"{in_seconds(best.time.step)} ({span})"
        figures["tokens a second"] = in_short(shown.tokens_per_second(best))
        figures["bubble"] = f"{best.time.bubble:.1%}"
    boxes = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures.items())
    yield f'<dl class="numbers">{"".join(boxes)}</dl>'


def _ranking(shown: Shown, listed: Sequence[Estimate]) -> Iterator[str]:
    yield "<h2>Layouts, the best first</h2>"
    shared = common(listed)
    if shared:
        yield f"<p>All of these: {escape(', '.join(shared))}.</p>"
    yield from _columns(ranked(shown, listed, shared))
    if not all(map(shown.fits, listed)):
        memory = in_bytes(shown.cluster.device.memory)
        yield f'<p class="pale">! is more than the {memory} of a device.</p>'
    yield "<h3>What the fullest rank holds, and a rank sends in a step</h3>"
    yield from _columns(held(listed))


def _columns(columns: Sequence[Column]) -> Iterator[str]:
    kinds = ["words" if column.heading in LEFT else "" for column in columns]
    yield '<div class="wide"><table><thead>'
    heads = [column.heading for column in columns]
    yield _row(list(zip(kinds, heads, strict=True)), "th") + "</thead><tbody>"
    for place, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        marked = [
            (f"{kind} bad".strip() if cell.endswith("!") else kind, cell)
            for kind, cell in zip(kinds, cells, strict=True)
        ]
        yield _row(marked, "td", "best" if place == 0 else "")
    yield "</tbody></table></div>"


def _layout(shown: Shown, estimate: Estimate, place: int) -> Iterator[str]:
    """Yield the tables of a layout and what its fullest rank holds, line by line."""
    layout = estimate.layout
    said = f"{sizes_of(layout)}: {', '.join(options_of(layout))}"
    yield f"<h2>{'The first in full' if place == 0 else 'The next'}</h2>" if place < 2 else ""
    opened = ' open=""' if place == 0 else ""
    yield f"<details{opened}><summary>{escape(said)}</summary>"
    yield from _memories(estimate)
    if layout.grid.pp > 1 and shown.timeline is not None:
        yield "<h3>What the pipeline computes when</h3>"
        yield f"<pre>{escape(to_text(shown.timeline(shortened(layout)), 120))}</pre>"
    yield "<h3>Where ranks meet</h3>"
    sizes = [(axis, layout.grid.size(axis)) for axis in AXES]
    rows = [
        (f"{axis} {n}", crossing(layout.grid, shown.cluster, axis)) for axis, n in sizes if n > 1
    ]
    yield from _pairs(("axis", "groups lie"), rows)
    yield from _sent(estimate)
    if shown.lines is not None:
        yield f"<h3>What pipeline rank {estimate.fullest} holds</h3>"
        named = [(name, f"{size:,}") for name, size in shown.lines(layout) if size]
        yield from _pairs(("what", "bytes"), named)
    yield "</details>"


def _memories(estimate: Estimate) -> Iterator[str]:
    """Yield the memory of each rank of the pipeline as a table."""
    yield "<h3>Memory of each rank of the pipeline, GiB</h3>"
    yield '<div class="wide"><table><thead>'
    yield _row([("", each) for each in ("pp", *SORTS, "total")], "th") + "</thead><tbody>"
    for rank, own in enumerate(estimate.memory):
        sizes = [gib(getattr(own, sort)) for sort in SORTS]
        cells = [("", each) for each in (str(rank), *sizes, gib(own.total))]
        yield _row(cells, "td", "best" if rank == estimate.fullest else "")
    yield "</tbody></table></div>"


def _sent(estimate: Estimate) -> Iterator[str]:
    most = max(estimate.traffic, key=lambda own: sum(each.bytes for each in own), default=())
    if rows := [each for each in most if each.count]:
        yield "<h3>What a rank sends in a step</h3>"
        heads = [("words", "axis"), ("words", "collective"), ("", "calls"), ("", "bytes")]
        yield '<div class="wide"><table><thead>' + _row(heads, "th") + "</thead><tbody>"
        for each in rows:
            numbers = [("", f"{each.count:,}"), ("", f"{each.bytes:,}")]
            yield _row([("words", each.axis), ("words", each.operation), *numbers], "td")
        yield "</tbody></table></div>"


def _refused(shown: Shown) -> Iterator[str]:
    if shown.refused:
        yield "<h2>Refused, and why</h2>"
        yield '<div class="wide"><table><thead>'
        yield _row([("", "layouts"), ("words", "such as"), ("words", "because")], "th")
        yield "</thead><tbody>"
        for count, example, why in grouped(shown.refused):
            yield _row([("", str(count)), ("words", example), ("long", why)], "td")
        yield "</tbody></table></div>"


def _notes(shown: Shown) -> Iterator[str]:
    device = shown.cluster.device
    notes = list(shown.notes)
    if device.source:
        notes.append(f"The device's figures: {device.source}.")
    for link in shown.cluster.links:
        notes.append(
            f"Groups within {link.ranks} ranks: {in_seconds(link.latency)} a message, "
            f"{in_bytes(link.bandwidth)} a second."
        )
    yield "<h2>What is assumed</h2>"
    yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def _pairs(heads: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield '<div class="wide"><table><thead>'
    yield _row([("words", heads[0]), ("", heads[1])], "th") + "</thead><tbody>"
    for name, value in rows:
        yield _row([("words", name), ("", value)], "td")
    yield "</tbody></table></div>"


def _row(cells: Cells, tag: str, kind: str = "") -> str:
    inner = "".join(
        f'<{tag} class="{own}">{escape(said)}</{tag}>' if own else f"<{tag}>{escape(said)}</{tag}>"
        for own, said in cells
    )
    return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"

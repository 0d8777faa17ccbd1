"""A plan as one HTML file: no server, nothing fetched, readable without JavaScript."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape

from ...parallel.pg_manager import layout_name
from ...parallel.pipeline_parallel.drawing import to_text
from ..estimate import Estimate
from ..search import Plan
from ..timing import timeline
from ..units import in_bytes, in_seconds
from .report import (
    Table,
    below,
    common,
    details,
    heading,
    holding,
    ranking,
    refusals,
    summary,
    words_of,
)  # fmt: skip

DRAWN = 3  # layouts in full
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #d9d9d9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #14161a; --line: #3a3f48;
  --bad: #ff8a80; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 70rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.words { text-align: left; } .bad { color: var(--bad); }
details { border: 1px solid var(--line); padding: .5rem 1rem; margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 12px/1.4 ui-monospace, Menlo, Consolas, monospace; }
@media print { body { max-width: none; } details { break-inside: avoid; } }
"""


def page(plan: Plan, top: int = 10, notes: Sequence[str] = ()) -> str:
    """Return a plan as an HTML page.

    Args:
        plan: The plan.
        top: Layouts in the table; the first three are shown in full.
        notes: Assumptions, a sentence each.
    """
    title = f"Plan for {plan.description.name} on {plan.cluster.ranks} x {plan.cluster.device.name}"
    listed = plan.top(top)
    body = [f"<h1>{escape(title)}</h1>", *_sentences(heading(plan))]
    if listed:
        shared = common(listed)
        body += _sentences([f"all of these: {', '.join(shared)}"] * bool(shared))
        body += [*_table(ranking(plan, listed, shared)), *_sentences(below(plan, listed))]
        body += ["<h2>What the fullest rank holds, and a rank sends in a step</h2>"]
        body += _table(holding(listed))
    else:
        body += ['<p class="bad">No layout is legal: see below for what is wrong with each.</p>']
    for place, estimate in enumerate(listed[:DRAWN]):
        body += _layout(plan, estimate, opened=place == 0)
    body += ["<h2>Refused, and why</h2>", *_sentences(refusals(plan))] if plan.refused else []
    body += ["<h2>What is assumed</h2>", *_sentences([*notes, *_figures(plan)])]
    return "\n".join([
        "<!doctype html>", '<html lang="en">', '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
        "<body>", *body, "</body>", "</html>", "",
    ])  # fmt: skip


def _layout(plan: Plan, estimate: Estimate, *, opened: bool) -> Iterator[str]:
    """Yield a layout in full."""
    layout = estimate.layout
    said = f"{layout_name(layout.grid)}: {', '.join(words_of(layout))}"
    yield '<details open="">' if opened else "<details>"
    yield f"<summary>{escape(said)}</summary>"
    yield from _sentences(summary(plan, estimate))
    for each in details(plan, estimate):
        yield from _table(each)
    if layout.grid.pp > 1 and estimate.time is not None:
        # As few micro-batches as show how the pipeline repeats itself.
        few = replace(layout, micro_batches=min(layout.micro_batches, 2 * layout.grid.pp))
        drawn = to_text(timeline(plan.description, few, plan.cluster), 120)
        yield f"<h3>what the pipeline computes when</h3><pre>{escape(drawn)}</pre>"
    yield "</details>"


def _figures(plan: Plan) -> Iterator[str]:
    """Yield the figures of the cluster that are assumed."""
    if source := plan.cluster.device.source:
        yield f"The device's figures: {source}."
    for link in plan.cluster.links:
        yield (
            f"Groups within {link.ranks} ranks: {in_seconds(link.latency)} a message, "
            f"{in_bytes(link.bandwidth)} a second."
        )


def _sentences(lines: Iterable[str]) -> Iterator[str]:
    yield from (f"<p>{escape(line)}</p>" for line in lines)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield f"<h3>{escape(table.title)}</h3>"
    yield '<div class="wide"><table>'
    for tag, cells in (("th", table.heads), *(("td", row) for row in table.rows)):
        inner = ""
        for at, cell in enumerate(cells):
            kind = "words" if at < table.words else "bad" if cell.endswith("!") else ""
            inner += f'<{tag} class="{kind}">{escape(cell)}</{tag}>'
        yield f"<tr>{inner}</tr>"
    yield "</table></div>"

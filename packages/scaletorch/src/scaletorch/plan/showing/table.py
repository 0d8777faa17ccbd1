"""A plan in the terminal: a ranked table, why others were refused, a rank line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ...parallel.pg_manager import count_communicators
from ..estimate import Estimate
from ..units import in_bytes, in_seconds, in_short
from .columns import LEFT, Column, common, gib, held, ranked
from .shown import SORTS, Shown, grouped, options_of, sizes_of

WIDTH, LEAST = 120, 80
REASONS = 6  # that are told apart


def table(shown: Shown, top: int = 10, width: int = WIDTH) -> str:
    """Return the plan as text.

    Args:
        shown: The plan.
        top: Layouts in the table.
        width: Columns of the terminal; less than 120 leaves columns out.
    """
    width = max(width, LEAST)
    lines = [*wrapped(_heading(shown), width), ""]
    if listed := shown.estimates[:top]:
        shared = common(listed)
        lines += [f"all of these: {', '.join(shared)}"] * bool(shared)
        lines += _rows(ranked(shown, listed, shared), width)
        lines += ["", *wrapped(_below(shown, listed), width), ""]
        lines += [*_rows(held(listed), width), ""]
    lines += wrapped([*_refused(shown), *(f"note: {note}" for note in shown.notes)], width)
    return "\n".join(lines).rstrip()


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield sentences in lines that are no longer than the terminal."""
    for each in lines:
        yield from textwrap.wrap(each, width, subsequent_indent="  ", break_on_hyphens=False)


def explained(shown: Shown, estimate: Estimate) -> str:
    """Return a layout in full: its pipeline's ranks, the fullest line by line, its messages."""
    layout, memory = estimate.layout, shown.cluster.device.memory
    verdict = "fits in" if shown.fits(estimate) else "does not fit in"
    lines = [
        f"DP x PP x CP x TP {sizes_of(layout)}, {', '.join(options_of(layout))}",
        f"{in_bytes(estimate.peak)} on the fullest rank: {verdict} {in_bytes(memory)}",
        "", *_memories(estimate),
    ]  # fmt: skip
    if estimate.communicators:
        count, size = count_communicators(layout.grid), in_bytes(estimate.communicators)
        lines += ["", f"communicators of each rank: {count}, which hold {size}"]
    if shown.lines is not None:
        named = [(name, size) for name, size in shown.lines(layout) if size]
        wide = max((len(name) for name, _ in named), default=0)
        lines += ["", f"pipeline rank {estimate.fullest} in bytes"]
        lines += [f"  {name:{wide}} {size:>18,}" for name, size in named]
    lines += ["", "sent by a rank in a step", *_messages(estimate)]
    return "\n".join([*lines, *_seconds(shown, estimate)])


def _heading(shown: Shown) -> Iterator[str]:
    device, ranks = shown.cluster.device, shown.cluster.ranks
    yield (
        f"{shown.name}: {shown.rows} rows of {shown.length} tokens a step on {ranks} x "
        f"{device.name}, {in_bytes(device.memory)} each"
    )
    yield shown.counted()


def _rows(columns: Sequence[Column], width: int) -> Iterator[str]:
    """Yield the lines of a table, without the columns for which there is no room."""
    cells = [[column.heading, *column.cells] for column in columns]
    wide = [max(map(len, column)) for column in cells]
    kept = list(range(len(columns)))
    if sum(wide[at] + 2 for at in kept) > width:
        kept = [at for at in kept if not columns[at].spare]
    for row in range(len(cells[0])):
        words = [
            f"{cells[at][row]:<{wide[at]}}"
            if columns[at].heading in LEFT
            else f"{cells[at][row]:>{wide[at]}}"
            for at in kept
        ]
        yield "  ".join(words).rstrip()


def _below(shown: Shown, listed: Sequence[Estimate]) -> list[str]:
    memory = in_bytes(shown.cluster.device.memory)
    said = []
    if not shown.fitting:
        said.append(
            f"none fits in {memory}: take more ranks, --recompute full, --zero 3 or --micro-rows 1"
        )
    elif not all(map(shown.fits, listed)):
        said.append(f"! is more than {memory}")
    best = listed[0]
    if best.time is not None:
        time = best.time
        said.append(
            f"steps are estimates: the first takes {in_seconds(time.low)} to "
            f"{in_seconds(time.high)}"
        )
    return said


def _refused(shown: Shown) -> Iterator[str]:
    reasons = list(grouped(shown.refused))
    for count, example, why in reasons[:REASONS]:
        others = f" and {count - 1} like it" if count > 1 else ""
        yield f"refused: {example}{others}: {why}"
    if (more := len(reasons) - REASONS) > 0:
        left = sum(count for count, _, _ in reasons[REASONS:])
        yield f"refused: {left} others for {more} other {'reason' if more == 1 else 'reasons'}"


def _memories(estimate: Estimate) -> Iterator[str]:
    yield "GiB of pipeline rank" + "".join(f"{sort:>13}" for sort in SORTS) + f"{'total':>9}"
    for rank, memory in enumerate(estimate.memory):
        sizes = "".join(f"{gib(getattr(memory, sort)):>13}" for sort in SORTS)
        mark = "  fullest" if rank == estimate.fullest and len(estimate.memory) > 1 else ""
        yield f"{rank:>20}{sizes}{gib(memory.total):>9}{mark}"


def _messages(estimate: Estimate) -> Iterator[str]:
    most = max(estimate.traffic, key=lambda own: sum(each.bytes for each in own), default=())
    if not any(each.count for each in most):
        yield "  nothing"
    for sent in most:
        calls, size = f"{sent.count:,} calls", f"{sent.bytes:,} bytes"
        if sent.count:
            yield f"  {sent.axis:6} {sent.operation:15} {calls:>14} {size:>24}"


def _seconds(shown: Shown, estimate: Estimate) -> Iterator[str]:
    time = estimate.time
    if time is None:
        return
    yield ""
    yield (
        f"step {in_seconds(time.step)} ({in_seconds(time.low)} to {in_seconds(time.high)}), "
        f"{in_short(shown.tokens_per_second(estimate))} tokens/s"
    )
    yield (
        f"  computing {in_seconds(time.computing)}, update {in_seconds(time.update)}, "
        f"bubble {time.bubble:.1%}"
    )
    for word, seconds in (("waits for", time.exposed), ("hides", time.hidden)):
        spent = [f"{axis} {in_seconds(each)}" for axis, each in seconds.items() if each]
        if spent:
            yield f"  {word} {', '.join(spent)}"

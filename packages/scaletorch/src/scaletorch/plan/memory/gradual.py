"""What a block needs backward while its gradients come, one after another."""

from __future__ import annotations

from ..gradients.brought import gradients_of
from ..gradients.filling import COMES, LATER, PARTS
from ..holding import Holdings
from ..layout import Layout
from .sizes import Exact, Sizes, sizes_of

Rows = dict[tuple[int, str, int], int]  # kind, whose gradient, and of `PARTS`


def needs_of(
    known: Holdings, layout: Layout, sizes: Sizes, at: int, *, half: bool
) -> tuple[Exact, Rows]:
    """Return what blocks need when each gradient comes and from then on, and where that stands."""
    key = layout.cut, layout.recompute, layout.micro_rows, "I" if half else "B"
    found: tuple[Exact, Rows] | None = known.made.get(key)
    if found is None:
        needs: list[float] = [0.0]
        rows: Rows = {(-1, "", LATER): 0}
        for kind, own in enumerate(known.description.behaviours(layout.cut)):
            peak = sizes.backward[half][kind][at]
            again = own.again.at(layout.micro_rows) * (
                layout.recompute == "full" and kind in known.layers
            )
            again += sizes.left[kind][at] * half
            rows[kind, "", COMES] = 0  # before it begins
            rows[kind, "", LATER] = len(needs)
            needs.append(peak)
            for name, *then in own.made:
                for part, most in zip(PARTS, then, strict=True):
                    rows[kind, name, part] = len(needs)
                    needs.append(min(most.at(layout.micro_rows) + again, peak))
            # A tied one that is told of elsewhere comes before all others.
            for name in {each.name for each in own.parameters} - {name for name, *_ in own.made}:
                if own.made:
                    first = rows[kind, own.made[0][0], COMES]
                    rows |= {(kind, name, part): first for part in PARTS}
        found = known.made[key] = needs, rows
    return found


def grown(known: Holdings, layout: Layout, number: int, chunk: int, action: str) -> tuple[int, ...]:
    """Return by the runs of a chunk what a block needs more because its own gradients stay.

    Args:
        known: Of the description.
        layout: One whose first backward brings gradients.
        number: Of `known.numbers(layout)`.
        chunk: Of the rank.
        action: "B", or "I" for the first half.
    """
    sizes, half = sizes_of(known, layout), action == "I"
    needs, rows = needs_of(known, layout, sizes, known.place_of_cut(layout), half=half)
    behaviours = known.description.behaviours(layout.cut)
    found = []
    for kind, _ in known.runs(number)[chunk]:
        own = {
            name: size
            for name, size, late in gradients_of(known, layout, number, chunk, kind)
            if not (half and late)
        }
        there, most = 0, 0.0
        for name, *_ in behaviours[kind].made:
            there += own.get(name, 0)
            most = max(most, there + needs[rows[kind, name, LATER]])
        found.append(max(0, round(most - needs[rows[kind, "", LATER]])))
    return tuple(found)

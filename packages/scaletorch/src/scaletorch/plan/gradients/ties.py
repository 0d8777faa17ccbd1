"""What stages with a tied weight need besides, when a step ends and they sum its gradients."""

from __future__ import annotations

from ..holding.holdings import Holdings
from ..layout import Layout


def of_ties(known: Holdings, layout: Layout, number: int, tp: int | None = None) -> tuple[int, int]:
    """Return the bytes of tied weights' total gradients, and of what other stages send for them.

    Args:
        known: Of the description.
        layout: The layout.
        number: Of `known.numbers(layout)`.
        tp: As for `Holdings.parameters`.
    """
    totals = others = 0
    if any(stages for _, stages in known.content(number).ties):
        grid = layout.grid
        for each in known.parameters(layout, number, tp):
            size = each.elements * each.item
            if each.others:
                others += size * each.others
                # Beside its bucket; where sums are of another dtype its gradient is there anyway.
                alike = known.optimizer.sum_item in (None, each.item)
                totals += size if alike and grid.cp * grid.dp > 1 else 0
    return totals, others

"""Format ranks for error and log messages."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 20  # how many ranks or runs of ranks to show


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text in the given order; three or more consecutive ones become a range.

    Example:
        >>> name_ranks([1, 4, 5, 6])
        'ranks 1, 4-6'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    shown = ", ".join(parts[:MOST]) + (f", … ({len(ranks)} in all)" if parts[MOST:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

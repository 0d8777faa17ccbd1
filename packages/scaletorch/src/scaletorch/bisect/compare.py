"""Comparison of two recorded runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..compose.summation import ROOM
from ..dist.errors import InvalidArgumentError
from ..verify.compare import LARGEST
from .comparing.ancestors import ancestors
from .comparing.births import find_births
from .comparing.how import how
from .comparing.judge import coarsest, judge_all, measure
from .comparing.rows import infer_rows, take_rows
from .comparing.runs import Run, load, require_comparable
from .comparing.shares import settle_losses, settle_weight
from .keys import DATA, FORWARD, GRADIENT, Key
from .recording.folder import read
from .report import Found, Report


def compare(
    reference: str | Path,
    run: str | Path,
    *,
    noise: str | Path | None = None,
) -> Report:
    """Find the first tensor that differs between two recorded runs of the same model and batch.

    Args:
        reference: The folder of the run that is right: one process in float64, or another layout,
            version of the code or version of torch.
        run: The folder of the run in question.
        noise: The folder of the reference in the run's dtype, or in another dtype below float64. It
            shows the rounding error of each tensor; needed for bfloat16.

    Returns:
        The report; `report.sound` if no result differs by more than rounding explains.

    Raises:
        InvalidArgumentError: A folder has no recording, an incomplete one, or lacks some ranks; the
            runs are of different models; or rounding alone would hide faults.

    Example:
        >>> print(compare("one", "two"))
    """
    steps, others = read(Path(reference)), read(Path(run))
    notes = infer_rows(steps, others)
    theirs, ours = load(reference, steps), load(run, others)
    lost = {}
    if noise is not None:
        lost = measure(load(noise, take_rows(steps, read(Path(noise)))), theirs)
    require_comparable(theirs, ours)
    command = f"again: python -m {__package__} compare {reference} {run}"
    command += f" --noise {noise}" if noise is not None else ""
    return replace(compare_runs(theirs, ours, lost), command=command, notes=notes)


def compare_runs(reference: Run, run: Run, lost: Mapping[Key, float]) -> Report:
    """Find the first tensor that differs between two loaded runs; `lost` is as for `judge_all`."""
    chain = chain_of(reference)
    eps = max(coarsest(run), coarsest(reference))
    if not lost and eps * ROOM * math.sqrt(chain) > LARGEST:
        raise InvalidArgumentError(
            f"rounding of {chain} additions at an epsilon of {eps:.0e} could hide faults: record "
            "one process in float64 as the reference, and one in this dtype as `noise`"
        )
    settle_losses(run, reference)
    settle_weight(run, reference)
    ancestry = ancestors(reference)
    judged = judge_all(run, reference, ancestry, lost, chain)
    births = find_births(judged, run, reference, ancestry)
    found = [Found(birth, how(birth, run, reference)) for birth in births]
    return Report(found, judged)


def chain_of(run: Run) -> int:
    """Return the largest number of additions between the inputs and any number compared.

    Each weight matrix contributes its two sizes; attention and the loss contribute the number of
    tokens in the batch.
    """
    sizes = tokens = 0
    for key, held in run.held.items():
        shape = held[0].line.shape
        if key.kind == GRADIENT and len(shape) > 1:
            sizes += sum(shape) * len({each.recording.rank for each in held})
        elif not tokens and key.kind in (FORWARD, DATA):
            parts = [math.prod(each.line.shape[:2]) for each in held]
            tokens = sum(parts)
    return sizes + 2 * tokens

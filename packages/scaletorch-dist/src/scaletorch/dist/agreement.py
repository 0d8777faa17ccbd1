"""Compare values that must be the same on all ranks; every rank raises if they differ."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from .errors import MismatchError, ScaletorchError
from .members import name_ranks
from .wire.backend import digest_of, gather_ints, gather_texts
from .wire.checks import begin
from .world.info import get_rank, group_ranks

SHOWN = 12  # lines of difference for each rank

Report = tuple[list[str], str | None]  # a rank's lines, and its own error as text


def caught(check: Callable[..., object], *arguments: Any) -> ScaletorchError | None:
    """Run a check and return its error, for `agree` to report to the other ranks, or None."""
    try:
        check(*arguments)
    except ScaletorchError as error:
        return error
    return None


def agree(
    subject: str,
    lines: Sequence[str],
    group: ProcessGroup | None = None,
    *,
    error: Exception | None = None,
    note: int = 0,
) -> tuple[int, ...]:
    """Raise on every rank of `group` unless all have equal `lines` and none has an `error`.

    Costs one all-gather of 24 bytes per rank; the lines are sent only if they differ. A rank
    with an error of its own must call this too, so that the others do not wait for it forever.

    Args:
        subject: The values that are compared, for the message.
        lines: One line of text for each value that must be equal.
        group: The ranks that compare; None for all.
        error: An error of this rank, raised once the other ranks have received it.
        note: A number to send to the other ranks, not compared.

    Returns:
        Every rank's note.

    Raises:
        MismatchError: Lines differ, or another rank has an error.
    """
    notes: tuple[int, ...] = (note,)
    members = begin(group, "agree", subject)
    if members is not None:
        digest = digest_of("\n".join(lines))
        heads = gather_ints((digest, error is not None, note), members)
        notes = tuple(theirs for _, _, theirs in heads)
        if any(said != [heads[0][0], 0] for *said, _ in heads):
            text = None if error is None else f"{type(error).__name__}: {error}"
            texts = gather_texts(json.dumps([list(lines), text]), members)
            if error is None:
                reports = [json.loads(report) for report in texts]
                raise MismatchError(_difference(subject, group_ranks(members), reports))
    if error is not None:
        try:
            raise error
        finally:
            del error  # breaks a cycle: its traceback holds this frame, and a step's tensors
    return notes


def _difference(subject: str, ranks: Sequence[int], reports: Sequence[Report]) -> str:
    for rank, (_, text) in zip(ranks, reports, strict=True):
        if text is not None:
            return f"rank {rank} cannot take part in {subject}: {text}"
    speakers: dict[tuple[str, ...], list[int]] = {}
    for rank, (said, _) in zip(ranks, reports, strict=True):
        speakers.setdefault(tuple(said), []).append(rank)
    usual = max(speakers, key=lambda lines: len(speakers[lines]))  # the first one on a tie
    odd = [rank for lines, said in speakers.items() if lines != usual for rank in said]
    differ = f"{name_ranks(odd)} differ{'s' * (len(odd) == 1)} from {name_ranks(speakers[usual])}"
    message = [
        f"the ranks disagree on {subject}: {differ}; every rank must be given the "
        f"same (this is rank {get_rank()})"
    ]
    for lines, odd in speakers.items():
        if lines != usual:
            message.append(f"{name_ranks(odd)} (+), {name_ranks(speakers[usual])} (-):")
            message += _changed_lines(usual, lines)
    return "\n".join(message)


def _changed_lines(usual: Sequence[str], lines: Sequence[str]) -> Iterator[str]:
    diff = difflib.unified_diff(usual, lines, n=0, lineterm="")
    changed = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    yield from (f"  {line[0]} {line[1:]}" for line in changed[:SHOWN])
    if len(changed) > SHOWN:
        yield f"  … and {len(changed) - SHOWN} lines more"

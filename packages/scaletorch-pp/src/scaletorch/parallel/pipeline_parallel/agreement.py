"""Ranks compare what they must agree on, and every one of them reports a difference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch.distributed import ProcessGroup

from ...dist import group_ranks
from ...dist.dist import all_gather, all_gather_object
from ...dist.errors import MismatchError


def agree(
    subject: str, facts: Sequence[str], error: Exception | None, group: ProcessGroup | None
) -> None:
    """Raise on every rank of ``group`` unless all have equal ``facts`` and none has an ``error``.

    Costs one all-gather of 16 bytes; the facts themselves travel only when they differ. A rank
    that has found a mistake of its own takes part too, so that no other waits for it in vain.

    Args:
        subject: what is compared, for the message.
        facts: one line of text for each thing that must be equal.
        error: a mistake already found on this rank, raised here after the others know.
        group: the ranks that compare; None is this process alone.

    Raises:
        MismatchError: ranks differ, or another rank has an error.
    """
    ranks = group_ranks(group)
    if len(ranks) > 1:
        mine = torch.tensor([_digest(facts), error is not None], dtype=torch.int64)
        everyone = [tuple(entry.tolist()) for entry in all_gather(mine, group=group)]
        if set(everyone) != {(everyone[0][0], 0)}:
            text = None if error is None else f"{type(error).__name__}: {error}"
            reports = all_gather_object((list(facts), text), group=group)
            if error is None:
                raise MismatchError(_difference(subject, ranks, reports))
    if error is not None:
        raise error


def _digest(facts: Sequence[str]) -> int:
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _difference(
    subject: str, ranks: Sequence[int], reports: Sequence[tuple[list[str], str | None]]
) -> str:
    for rank, (_, text) in zip(ranks, reports, strict=True):
        if text is not None:
            return f"rank {rank} cannot take part in {subject}: {text}"
    (first, (ours, _)), *others = zip(ranks, reports, strict=True)
    rank, theirs = next((rank, facts) for rank, (facts, _) in others if facts != ours)
    pairs = zip_longest(ours, theirs, fillvalue="nothing more")
    left, right = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"the ranks of the pipeline disagree on {subject}: rank {first} has {left}, "
        f"rank {rank} has {right}; every stage must be given the same"
    )

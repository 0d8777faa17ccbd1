"""Errors of torch about shapes, explained if sequence parallelism may be their cause.

A model's own code fails so when it mixes a share of the hidden states with something whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .sequence_shares import SequenceShares
from .uncompiled import around_compiled

IN_MODEL = (
    "makes something of the whole length (a mask, positions, a reshape, another sequence) outside "
    "of its attention and MLP modules, where hidden states are this rank's share of the tokens",
    "Make it inside of these modules, style the layers 'sequence_layer' or the last module before "
    "such code 'sequence_join', or do without sequence parallelism",
)
IN_REGION = (
    "sees the whole sequence, but what its row-parallel layer returns is this rank's share of the "
    "tokens",
    "Add a residual, or go on with the whole, outside of it, or do without sequence parallelism",
)

_OF_SHAPES = re.compile(
    r"[Ss]izes? of tensor|shape '|view size|must match|split_sizes|shapes cannot be multiplied"
)


@contextmanager
@around_compiled
def shapes_explained(where: str, why: tuple[str, str], shares: SequenceShares) -> Iterator[None]:
    """Add to an error of torch about shapes what sequence parallelism has to do with it.

    Args:
        where: What the body runs.
        why: `IN_MODEL` or `IN_REGION`: what it does, and the way out.
        shares: How sequences are shared out.

    Raises:
        InvalidArgumentError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError or not _OF_SHAPES.search(str(error)):
            raise
        tokens = "" if shares.own is None else f" ({shares.own} of {shares.length})"
        raise InvalidArgumentError(
            f"{describe_rank()}: with sequence parallelism {where} {why[0]}{tokens}. {why[1]}. "
            f"It failed with {str(error).splitlines()[0]!r}"
        ) from error

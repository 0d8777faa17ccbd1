"""Errors of torch about shapes, explained if sequence parallelism may be their cause.

A model's own code fails so when it mixes a share of the hidden states with something whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .sequence_shares import SequenceShares
from .uncompiled import around_compiled

Reason = tuple[str, str]

IN_MODEL = (
    "makes something of the whole length (a mask, positions, a reshape, another sequence) outside "
    "of its attention and MLP modules, where hidden states are this rank's share of the tokens",
    "Make it inside of these modules, style the layers 'sequence_layer', or do without sequence "
    "parallelism",
)
BEHIND_ROW = (
    "sees the whole sequence, but what its row-parallel layer returns is this rank's share of the "
    "tokens",
    "Add a residual, or go on with the whole, outside of it, or do without sequence parallelism",
)
IN_REGION = (
    "has a share of the heads and features, of the whole sequence and not of this rank's tokens",
    "A number of heads, a width or something made for all heads does not fit these, also without "
    "sequence parallelism: write -1 for a size, divide an attribute in the plan "
    "(Divide('num_heads')), style what makes features that are needed together 'column_gather' and "
    "what takes them 'row_split', and a module with parameters for each head PerHead('name')",
)

_OF_SHAPES = re.compile(
    r"[Ss]izes? of tensor|shape '|view size|must match|split_sizes|shapes cannot be multiplied"
)


@contextmanager
@around_compiled
def shapes_explained(
    where: str, why: Reason | Callable[[], Reason], shares: SequenceShares
) -> Iterator[None]:
    """Add to an error of torch about shapes what sequence parallelism has to do with it.

    Args:
        where: What the body runs.
        why: What it does, and the way out; or what returns them once it has failed.
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
        what, way_out = why() if callable(why) else why
        raise InvalidArgumentError(
            f"{describe_rank()}: with sequence parallelism {where} {what}{tokens}. {way_out}. "
            f"It failed with {str(error).splitlines()[0]!r}"
        ) from error

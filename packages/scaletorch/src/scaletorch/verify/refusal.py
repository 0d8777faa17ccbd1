"""What the library refuses in words is no fault, where every rank refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..dist import RankFailedError
from ..dist.errors import InvalidArgumentError, MismatchError, ScaletorchError


class RefusedError(ScaletorchError):
    """The library refuses a case, before its first step is done.

    Args:
        heard: Whether this rank only heard of it from another one.
        words: What it said.
    """

    def __init__(self, heard: bool, words: str) -> None:
        super().__init__(heard, words)
        self.heard, self.words = heard, words

    def __str__(self) -> str:
        """Return what was said."""
        return self.words


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a `RefusedError` in the place of what says that arguments cannot work together."""
    try:
        yield
    except (InvalidArgumentError, MismatchError) as error:
        raise RefusedError(isinstance(error, MismatchError), str(error)) from error


def refusal(error: RankFailedError, world_size: int) -> str:
    """Return in one line why the library refuses a case, or '' where something else happened.

    Every rank must have refused it, and one by its own finding: mismatches alone are ranks that
    disagree, which is a fault.
    """
    found = [each for each in error.exceptions.values() if isinstance(each, RefusedError)]
    own = [each.words for each in found if not each.heard]
    return own[0].split("\n", 1)[0] if own and len(found) == world_size else ""

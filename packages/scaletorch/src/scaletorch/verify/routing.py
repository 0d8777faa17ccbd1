"""How near tokens are to other experts, and whether rounding sent one to others.

Top-k is a discontinuity: where the k-th and the next score are nearer to each other than rounding
tells them apart, a token may go to another expert than in one process, and nothing after that can
be compared. That is a flip and no fault. Scores are seen where a model calls `topk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .compare import Difference

_CALLS = torch.topk, Tensor.topk
FLIP = "routing"  # the name of a difference that says so


class Choice(NamedTuple):
    """One call of `topk`: the scores, [T, E], and whether each was chosen."""

    scores: Tensor
    chosen: Tensor


class _Watch(TorchFunctionMode):
    """Notes calls of `topk` over the last dim of scores that leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Choice] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, and note it."""
        found = func(*args, **(kwargs or {}))
        if func in _CALLS:
            choice = choice_of(found.indices, *args, **(kwargs or {}))
            self.choices += [] if choice is None else [choice]
        return found


def choice_of(
    index: Tensor, input: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any
) -> Choice | None:
    """Return what a call of `topk` chose; None unless it left out scores of the last dim."""
    last = dim in (-1, input.ndim - 1)
    if not (last and largest and input.ndim > 1 and k < input.shape[-1]):
        return None
    scores = input.detach().flatten(0, -2)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return Choice(scores, chosen.scatter_(1, index.flatten(0, -2), True))


@contextmanager
def watched(*, on: bool = True) -> Iterator[list[Choice]]:
    """Yield a list that gets the choices of what runs; it stays empty if it is not `on`."""
    watch = _Watch()
    if not on:
        yield watch.choices
        return
    with watch:
        yield watch.choices


def margins(choice: Choice) -> Tensor:
    """Return how far the last chosen score is above the next, [T], of the largest in the row."""
    scores, chosen = choice
    last = scores.masked_fill(~chosen, torch.inf).amin(1)
    following = scores.masked_fill(chosen, -torch.inf).amax(1)
    found = (last - following) / sizes(scores)
    return found.nan_to_num(nan=torch.inf)  # both minus infinity: neither was to be chosen


def sizes(scores: Tensor) -> Tensor:
    """Return the largest finite score of each row, [T]: what distances are measured by."""
    size = scores.abs().masked_fill(scores.isinf(), 0).amax(1)
    return size.clamp(min=torch.finfo(scores.dtype).tiny)


def smallest(choices: Sequence[Choice]) -> float:
    """Return the smallest margin of all tokens; infinite if there were no choices."""
    return min(
        (float(margins(each).min()) for each in choices if len(each.scores)), default=torch.inf
    )


def doubtful(choices: Sequence[Choice], limit: float) -> list[Choice]:
    """Return the tokens whose margin is at most `limit`: rounding may choose otherwise."""
    near = [(each, margins(each) <= limit) for each in choices]
    return [Choice(each.scores[rows], each.chosen[rows]) for each, rows in near if rows.any()]


def flips(
    choices: Sequence[Choice], theirs: Sequence[Choice], step: int, limit: float
) -> Iterator[Difference]:
    """Yield the nearest token that chose otherwise here than in one process, if there is one.

    Args:
        choices: Of this rank, in a step.
        theirs: The doubtful ones of one process in it.
        step: 0-based.
        limit: How far scores may be off by rounding, of the largest in their row.
    """
    found = [m for one in theirs for ours in choices for m in _flipped(ours, one, limit)]
    if found:
        note = (
            f"a token went to other experts than in one process: its last score and the next are "
            f"{min(found):.1e} of the largest apart, and rounding may come to {limit:.1e}"
        )
        yield Difference(FLIP, step, 0.0, limit, note=note)


def _flipped(ours: Choice, one: Choice, limit: float) -> list[float]:
    """Return the margins of tokens that have the scores of one process's and chose otherwise."""
    if ours.scores.shape[1] != one.scores.shape[1]:
        return []
    gaps = (ours.scores[:, None] - one.scores[None]).abs().nan_to_num(nan=0.0).amax(2)
    same = gaps <= limit * sizes(one.scores)
    other = (ours.chosen[:, None] != one.chosen[None]).any(2)
    return [float(each) for each in margins(one)[(same & other).any(0)]]

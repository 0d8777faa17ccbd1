"""Replay of one process's expert choices for tokens that rounding might send to other experts.

Top-k is discontinuous: if rounding can swap the k-th and the next score, a token may go to another
expert than in one process, and nothing after that can be compared. For these tokens, calls of
`topk` return one process's choice. float64 needs no replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .precision import replaced


class Choice(NamedTuple):
    """One call of `topk`: the scores, [T, E], and whether each was chosen."""

    scores: Tensor
    chosen: Tensor


def choice_of(
    index: Tensor, input: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any
) -> Choice | None:
    """Return the choice of a `topk` call; None unless it chose some scores of the last dim."""
    last = dim in (-1, input.ndim - 1)
    if not (last and largest and input.ndim > 1 and k < input.shape[-1]):
        return None
    scores = input.detach().flatten(0, -2)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return Choice(scores, chosen.scatter_(1, index.flatten(0, -2), True))


def margins(choice: Choice) -> Tensor:
    """Return last chosen score minus the next, relative to the largest in the row, [T]."""
    scores, chosen = choice
    last = scores.masked_fill(~chosen, torch.inf).amin(1)
    following = scores.masked_fill(chosen, -torch.inf).amax(1)
    found = (last - following) / sizes(scores)
    return found.nan_to_num(nan=torch.inf)  # both are minus infinity: masked, so not in doubt


def sizes(scores: Tensor) -> Tensor:
    """Return the largest finite absolute score of each row, [T], the unit of score differences."""
    size = scores.abs().masked_fill(scores.isinf(), 0).amax(1)
    return size.clamp(min=torch.finfo(scores.dtype).tiny)


def doubtful(choices: Sequence[Choice], limit: float) -> list[Choice]:
    """Return the tokens whose margin is at most `limit`: rounding may change their choice."""
    near = [(each, margins(each) <= limit) for each in choices]
    return [Choice(each.scores[rows], each.chosen[rows]) for each, rows in near if rows.any()]


Decide = Callable[[Choice], Tensor | None]  # a choice -> another mask to use instead, or None


@contextmanager
def decided(decide: Decide) -> Iterator[None]:
    """Let `decide` replace choices of `torch.topk` and `Tensor.topk`."""
    # No torch function mode, which is off while a backward recomputes.
    asking = _asking(torch.topk, decide)
    with replaced(torch, topk=asking), replaced(Tensor, topk=asking):
        yield


@contextmanager
def watched() -> Iterator[list[Choice]]:
    """Yield a list to which every choice within the context is added."""
    choices: list[Choice] = []
    with decided(choices.append):
        yield choices


def _asking(original: Callable[..., Any], decide: Decide) -> Callable[..., Any]:
    @functools.wraps(original)
    def topk(input: Tensor, *given: Any, **named: Any) -> Any:
        found = original(input, *given, **named)
        choice = choice_of(found.indices, input, *given, **named)
        chosen = None if choice is None else decide(choice)
        if chosen is None:
            return found
        kept = input.detach().masked_fill(~chosen.view_as(input), -torch.inf)
        index = kept.argsort(dim=-1, descending=True)[..., : found.indices.shape[-1]]
        return torch.return_types.topk((input.gather(-1, index), index))

    return topk


def in_order(choices: Sequence[Choice]) -> Decide:
    """Return a `Decide` that repeats the choices of these calls, one after another."""
    calls = iter(choices)
    return lambda choice: next(calls).chosen


def by_scores(choices: Sequence[Choice], limit: float, sent: list[float]) -> Decide:
    """Return a `Decide` that chooses as one process did for the token with the same scores.

    `limit` is the largest rounding error of scores, relative to the largest in their row; `sent`
    gets one process's margin of each token whose choice is replaced.
    """

    def decide(ours: Choice) -> Tensor | None:
        same_width = [c for c in choices if c.scores.shape[1] == ours.scores.shape[1]]
        near = (margins(ours) <= 2 * limit).nonzero().flatten()
        if not same_width or not len(near):
            return None
        scores = torch.cat([each.scores for each in same_width])
        taken = torch.cat([each.chosen for each in same_width])
        gaps = (ours.scores[near][:, None] - scores[None]).abs().nan_to_num(nan=0.0).amax(2)
        gap, nearest = gaps.min(1)
        found = gap <= limit * sizes(scores[nearest])
        found &= (taken[nearest] != ours.chosen[near]).any(1)
        found &= taken[nearest].sum(1) == ours.chosen[near].sum(1)
        if not found.any():
            return None
        sent.extend(margins(Choice(scores[nearest][found], taken[nearest][found])).tolist())
        chosen = ours.chosen.clone()
        chosen[near[found]] = taken[nearest][found]
        return chosen

    return decide

"""The experts that tokens go to: if rounding would choose others, the choice of one process holds.

Top-k is a discontinuity: where the k-th and the next score are nearer to each other than rounding
tells them apart, a token may go to another expert than in one process, and nothing after that could
be compared. So such calls of `topk` are answered as in one process. float64 needs none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compare import Difference

REPLAYED = "routing"  # the name of a difference that says so


class Choice(NamedTuple):
    """One call of `topk`: the scores, [T, E], and whether each was chosen."""

    scores: Tensor
    chosen: Tensor


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


def doubtful(choices: Sequence[Choice], limit: float) -> list[Choice]:
    """Return the tokens whose margin is at most `limit`: rounding may choose otherwise."""
    near = [(each, margins(each) <= limit) for each in choices]
    return [Choice(each.scores[rows], each.chosen[rows]) for each, rows in near if rows.any()]


NAME = "topk"
Decide = Callable[[Choice], Tensor | None]  # what was chosen -> what to choose instead, if anything


@contextmanager
def decided(decide: Decide | None) -> Iterator[None]:
    """Ask `decide`, if there is one, about every choice of `torch.topk` or a tensor's own.

    In a backward that recomputes, too, where a mode of torch's would be off.
    """
    if decide is None:
        yield
        return
    before = {place: vars(place).get(NAME) for place in (torch, Tensor)}
    asking = _asking(torch.topk, decide)
    for place in before:
        setattr(place, NAME, asking)
    try:
        yield
    finally:
        for place, own in before.items():
            if own is None:
                delattr(place, NAME)  # inherited
            else:
                setattr(place, NAME, own)


@contextmanager
def watched() -> Iterator[list[Choice]]:
    """Yield a list that gets the choices of what runs."""
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
    """Return what chooses as these calls did, one after another."""
    calls = iter(choices)
    return lambda choice: next(calls).chosen


def by_scores(choices: Sequence[Choice], limit: float, sent: list[float]) -> Decide:
    """Return what chooses for a token as one process did for the token of the same scores.

    Args:
        choices: One process's tokens in a step whose margins are at most four times `limit`.
        limit: How far scores may be off by rounding, of the largest in their row.
        sent: Gets the margin, in one process, of each token that would have gone elsewhere.
    """

    def decide(ours: Choice) -> Tensor | None:
        alike = [c for c in choices if c.scores.shape[1] == ours.scores.shape[1]]
        near = (margins(ours) <= 2 * limit).nonzero().flatten()
        if not alike or not len(near):
            return None
        scores = torch.cat([each.scores for each in alike])
        taken = torch.cat([each.chosen for each in alike])
        gaps = (ours.scores[near][:, None] - scores[None]).abs().nan_to_num(nan=0.0).amax(2)
        gap, at = gaps.min(1)
        found = (gap <= limit * sizes(scores[at])) & (taken[at] != ours.chosen[near]).any(1)
        found &= taken[at].sum(1) == ours.chosen[near].sum(1)
        if not found.any():
            return None
        sent.extend(margins(Choice(scores[at][found], taken[at][found])).tolist())
        chosen = ours.chosen.clone()
        chosen[near[found]] = taken[at][found]
        return chosen

    return decide


def replayed(sent: Sequence[float], step: int, limit: float) -> Iterator[Difference]:
    """Yield how many choices were made as in one process, if any were."""
    if sent:
        note = (
            f"{len(sent)} choices were made as in one process, where rounding chose other experts: "
            f"their last score and the next are up to {max(sent):.1e} of the largest apart, and "
            f"rounding may come to {limit:.1e}"
        )
        yield Difference(REPLAYED, step, 0.0, limit, note=note)

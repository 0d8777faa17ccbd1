"""Tokens go to the experts that they went to in one process, where rounding would choose others.

Calls of `topk` are answered so, in a backward that recomputes too. For bfloat16, whose rounding
sends tokens elsewhere in every run: what is left then can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .compare import Difference
from .routing import FLIP, Choice, choice_of, margins, sizes

NAME = "topk"
Decide = Callable[[Choice], Tensor | None]  # what was chosen -> what to choose instead, if anything


@contextmanager
def decided(decide: Decide | None) -> Iterator[None]:
    """Ask `decide`, if there is one, about every choice of `torch.topk` or a tensor's own."""
    if decide is None:
        yield
        return
    original, places = torch.topk, (torch, Tensor)
    for place in places:
        setattr(place, NAME, _asking(original, decide))
    try:
        yield
    finally:
        setattr(torch, NAME, original)
        delattr(Tensor, NAME)  # inherited


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
        yield Difference(FLIP, step, 0.0, limit, note=note)

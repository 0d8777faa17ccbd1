"""Checks of dropout: it cannot equal one process's, but every layout must meet two conditions.

Equal inputs of one module must lose the same elements: on tp replicas, and in a layer that is
recomputed. Different inputs must not: other rows, positions, layers, shards and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..dist import all_gather_object
from ..parallel.pg_manager.building import digest
from .differences import INFINITE, Difference


class Draw(NamedTuple):
    """One call of a dropout module: digests of its input and of the dropped elements."""

    name: str
    place: tuple[int, int]  # dp rank and cp rank: the same in a tp group
    given: int
    dropped: int
    telling: bool  # whether another draw is unlikely to drop the same by chance


def dropouts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the dropout modules that draw in training, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    }


def switch(model: nn.Module, *, on: bool) -> None:
    """Switch all dropout modules of a model on or off."""
    for module in dropouts(model).values():
        module.train(on)


@contextmanager
def recorded(model: nn.Module, place: tuple[int, int]) -> Iterator[list[Draw]]:
    """Yield a list to which every draw of the model's dropout modules is added."""
    draws: list[Draw] = []

    def note(name: str, _: nn.Module, inputs: Any, out: Tensor) -> None:
        given = inputs[0].detach()
        dropped = (out.detach() == 0) & (given != 0)
        digests = int(digest(given)), int(digest(dropped))
        draws.append(Draw(name, place, *digests, _tells(dropped)))

    handles = [m.register_forward_hook(partial(note, n)) for n, m in dropouts(model).items()]
    try:
        yield draws
    finally:
        for handle in handles:
            handle.remove()


def judge(draws: list[Draw], step: int) -> Iterator[Difference]:
    """Compare this rank's draws with those of all ranks, which all call it; one entry a module."""
    everyone = [Draw(*each) for rank in all_gather_object(list(map(tuple, draws))) for each in rank]
    for name in dict.fromkeys(draw.name for draw in draws):
        notes = (_contradiction(mine, everyone) for mine in draws if mine.name == name)
        note = next((note for note in notes if note), "")
        yield Difference(f"dropout {name}", step, INFINITE if note else 0.0, 0.0, note=note)


def _contradiction(mine: Draw, everyone: list[Draw]) -> str:
    for other in everyone:
        related = (other.name, other.place) == (mine.name, mine.place)
        same_input = related and other.given == mine.given
        same_mask = other.dropped == mine.dropped
        where = f"{other.name} at dp {other.place[0]}, cp {other.place[1]}"
        if same_input and not same_mask:
            return f"an equal input of {where} lost other elements: replicas drift apart"
        if same_mask and mine.telling and not same_input:
            return f"another input of {where} lost the same elements: they must be independent"
    return ""


def _tells(dropped: Tensor) -> bool:
    """Return whether two draws with this drop rate agree at most once in 10^9 times."""
    share = float(dropped.double().mean()) if dropped.numel() else 0.0
    return dropped.numel() * math.log(share**2 + (1 - share) ** 2) < -9 * math.log(10)

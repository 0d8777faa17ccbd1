"""Gather whole hidden states, weights and gradients of the small step from the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...dist import all_gather_object
from ...parallel.pg_manager import ProcessGroupManager
from ..forward import pipeline_of
from ..plain import Plain
from ..state import gather_full, local_gradients
from .joining import Joiner
from .recording import Record, Records

_KINDS = ("given", "made", "given_gradient", "made_gradient")


class Joined(NamedTuple):
    """A whole tensor that ranks had.

    Attributes:
        tensor: None if they had none, or it is not known.
        known: Whether it could be joined, or is missing on all ranks.
    """

    tensor: Tensor | None
    known: bool


@dataclass(slots=True)
class Ranks:
    """Gathers tensors from the ranks; every rank calls its methods in the same order.

    Attributes:
        model: What `parallelize` returned, with the gradients of the small step.
        manager: The grid.
        plain: The plain model.
        joiner: Joins hidden states.
        records: This rank's calls of units.
        compared: Weights whose gradients have been compared.
        apart: Units whose calls differ between ranks, or whose tensors cannot be joined.
    """

    model: nn.Module
    manager: ProcessGroupManager
    plain: Plain
    joiner: Joiner
    records: Records
    compared: set[str] = field(default_factory=set)
    apart: dict[str, None] = field(default_factory=dict)
    _gradients: dict[str, Tensor] = field(default_factory=dict)
    _parameters: dict[str, Tensor] = field(default_factory=dict)
    _turns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _have: set[tuple[str, int, int, str]] = field(default_factory=set)
    _trained: dict[str, bool] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)

    def exchange(self) -> None:
        """Let all ranks know which calls, tensors and gradients there are."""
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._first = {n: first for first, names in self.plain.names.items() for n in names}
        found = local_gradients(self.model)
        calls = {
            key: [[kind for kind in _KINDS if getattr(r, kind) is not None] for r in records]
            for key, records in self.records.items()
        }
        facts = {n: (p.requires_grad, n in found) for n, p in self._parameters.items()}
        everyone = all_gather_object((calls, facts), self.manager.world_group)
        with_gradient = {n for _, their in everyone for n, (_, there) in their.items() if there}
        for name, parameter in self._parameters.items():
            if name in found:
                self._gradients[name] = found[name]
            elif name in with_gradient:  # that another rank has
                self._gradients[name] = torch.zeros_like(parameter)
        for _, their in everyone:
            for name, (trains, _) in their.items():
                if name in self._first:
                    self._trained[self._first[name]] = trains
        self._settle_calls([their for their, _ in everyone])

    def _settle_calls(self, everyone: Sequence[Mapping[tuple[str, int], list[list[str]]]]) -> None:
        """Note which calls a unit has in one forward, and which tensors all ranks have of each."""
        micro_batches = self.joiner.micro_batches
        for name, stage in sorted({key for calls in everyone for key in calls}, key=lambda k: k[1]):
            held = [calls[name, stage] for calls in everyone if (name, stage) in calls]
            if len({len(each) for each in held}) > 1 or len(held[0]) % micro_batches:
                self.apart[name] = None
                continue
            each = len(held[0]) // micro_batches
            self._turns.setdefault(name, []).extend((stage, turn) for turn in range(each))
            for turn in range(each):
                for kind in _KINDS:
                    indices = range(turn, len(held[0]), each)
                    if all(kind in theirs[index] for theirs in held for index in indices):
                        self._have.add((name, stage, turn, kind))

    def turns(self, name: str) -> int:
        """Return how often the layout calls a unit in one forward."""
        return len(self._turns.get(name, ()))

    def runs(self, name: str) -> bool:
        """Return whether this rank runs a unit; no rank may, and then all of them compare it."""
        if name not in self._turns:
            return True
        return any(unit == name for unit, _ in self.records)

    def trained_here(self) -> dict[str, Tensor]:
        """Return this rank's trained parameters, by first names."""
        named = self._parameters.items()
        found = {self._first[n]: p for n, p in named if p.requires_grad and n in self._first}
        return found

    def trains(self, name: str) -> bool:
        """Return whether a weight is trained."""
        return self._trained.get(name, False)

    def join(self, unit: str, turn: int, kind: str, shape: torch.Size) -> Joined:
        """Return a whole tensor of a unit's call.

        Args:
            unit: Its first name.
            turn: Which call of it in one forward.
            kind: An attribute of `Record`.
            shape: Of one process's.
        """
        turns = self._turns.get(unit, [])
        if turn >= len(turns):
            return Joined(None, unit not in self.apart)
        stage, own = turns[turn]
        if (unit, stage, own, kind) not in self._have:
            return Joined(None, known=True)
        each = sum(other == stage for other, _ in turns)
        records: list[Record] = self.records.get((unit, stage), [])
        parts = [getattr(record, kind) for record in records[own::each]]
        stages = pipeline_of(self.model).all_stages
        (place,) = (rank for rank, theirs in enumerate(stages) if stage in theirs)
        whole = self.joiner.join(parts, place, shape)
        if whole is None:
            self.apart[unit] = None
        return Joined(whole, known=whole is not None)

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole weights by their first names."""
        return self._whole({n: p.detach() for n, p in self._parameters.items()}, names)

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole gradients by the first name of each parameter."""
        return self._whole(self._gradients, names)

    def _whole(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        wanted = {name: first for first in names for name in self.plain.names[first]}
        held = {n: tensor for n, tensor in tensors.items() if n in wanted}
        whole = gather_full(self.model, held, self.manager)
        return {wanted[n]: t.to(self.joiner.device) for n, t in whole.items() if n in wanted}

"""Gather whole hidden states, weights and gradients of the small step from all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...dist import all_gather, all_gather_object, all_reduce, get_comm_device
from ...parallel.context_parallel import contiguous
from ...parallel.pg_manager import ProcessGroupManager
from ..forward import pipeline_of
from ..plain import Plain
from ..state import gather_stage, local_gradients, of_all_stages
from .batch import SmallBatch
from .training import Record, Records

_KINDS = ("input", "output", "input_gradient", "output_gradient")


class DivergedError(Exception):
    """An error of ranks that cannot go on with a rehearsal together."""


class Joined(NamedTuple):
    """A whole tensor, joined from the ranks' shards; `known` if it was joined or no rank has it."""

    tensor: Tensor | None
    known: bool


class _Form(NamedTuple):
    """The dims of a tensor that hold rows and positions; tokens of both if `flat`."""

    rows: int
    positions: int | None
    flat: bool = False
    shared: bool = False  # each tp rank has a shard of the positions


@dataclass(slots=True)
class Ranks:
    """Access to the tensors of all ranks; every rank calls its methods in the same order."""

    model: nn.Module
    manager: ProcessGroupManager
    plain: Plain
    small: SmallBatch
    records: Records
    device: torch.device
    compared: set[str] = field(default_factory=set)  # weights whose gradients were compared
    unjoined: dict[str, None] = field(default_factory=dict)  # units that cannot be joined
    dtype: torch.dtype = torch.float64  # the coarsest of the weights
    _with_gradient: set[str] = field(default_factory=set)  # names with a gradient on any rank
    _parameters: dict[str, Tensor] = field(default_factory=dict)
    _turns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _have: set[tuple[str, int, int, str]] = field(default_factory=set)
    _trained: dict[str, bool] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)
    _alone: dict[str, bool] = field(default_factory=dict)

    def exchange(self) -> None:
        """Exchange between all ranks which calls, tensors and gradients they have."""
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._first = {n: first for first, names in self.plain.names.items() for n in names}
        calls = {
            key: [[kind for kind in _KINDS if getattr(r, kind) is not None] for r in records]
            for key, records in self.records.items()
        }
        facts = {n: (p.requires_grad, p.grad is not None) for n, p in self._parameters.items()}
        alone = [(unit, r.alone) for (unit, _), held in self.records.items() for r in held]
        floating = [p.dtype for p in self._parameters.values() if p.is_floating_point()]
        dtype = max(floating, key=_eps, default=torch.float64)
        own = calls, facts, alone, dtype
        everyone = all_gather_object(own, self.manager.world_group)
        self.dtype = max((theirs for *_, theirs in everyone), key=_eps)
        for _, their, *_ in everyone:
            for name, (trains, has_gradient) in their.items():
                if has_gradient:
                    self._with_gradient.add(name)
                if name in self._first:
                    self._trained[self._first[name]] = trains
        self._settle_calls([their for their, *_ in everyone])
        for name, holds in (each for _, _, theirs, _ in everyone for each in theirs):
            self._alone[name] = self._alone.get(name, True) and holds

    def _settle_calls(self, everyone: Sequence[Mapping[tuple[str, int], list[list[str]]]]) -> None:
        """Record each unit's calls in one forward, and the tensors of each that all ranks have."""
        micro_batches = self._micro_batches
        for name, stage in sorted({key for calls in everyone for key in calls}, key=lambda k: k[1]):
            held = [calls[name, stage] for calls in everyone if (name, stage) in calls]
            if len({len(each) for each in held}) > 1 or len(held[0]) % micro_batches:
                self.unjoined[name] = None
                continue
            each = len(held[0]) // micro_batches
            self._turns.setdefault(name, []).extend((stage, turn) for turn in range(each))
            for turn in range(each):
                for kind in _KINDS:
                    indices = range(turn, len(held[0]), each)
                    if all(kind in theirs[index] for theirs in held for index in indices):
                        self._have.add((name, stage, turn, kind))

    def returns_alone(self, name: str) -> bool:
        """Return whether a unit, called once, returned hidden states and did nothing else."""
        weights, owners = {*self.plain.owners[name]}, self.plain.owners.items()
        shares = any(weights & {*theirs} for other, theirs in owners if other != name)
        called_once = not shares and self.turns(name) == 1 and name not in self.unjoined
        return called_once and self._alone.get(name, False)

    def meet(self, where: str, *, failed: bool = False) -> None:
        """Check that all ranks are at the same place before they communicate; all raise if not."""
        place = zlib.crc32(where.encode())
        group = self.manager.world_group
        told = torch.tensor([failed, place, -place], device=get_comm_device(group))
        all_reduce(told, "max", group=group)
        stopped, most, least = told.tolist()
        if stopped or most != -least:
            raise DivergedError("it ran otherwise on other ranks")

    def turns(self, name: str) -> int:
        """Return the number of calls of a unit in one forward of the layout."""
        return len(self._turns.get(name, ()))

    def runs(self, name: str) -> bool:
        """Return whether this rank compares a unit: it runs the unit, or no rank does."""
        if name not in self._turns:
            return True
        return any(unit == name for unit, _ in self.records)

    def trained_here(self) -> dict[str, Tensor]:
        """Return this rank's trained parameters, by first name."""
        named = self._parameters.items()
        return {self._first[n]: p for n, p in named if p.requires_grad and n in self._first}

    def trains(self, name: str) -> bool:
        """Return whether a weight is trained."""
        return self._trained.get(name, False)

    def join(self, unit: str, turn: int, kind: str, shape: torch.Size) -> Joined:
        """Return a whole tensor of a unit's call, with its `shape` and order in one process."""
        self.meet(f"{unit} {turn} {kind}")
        turns = self._turns.get(unit, [])
        if turn >= len(turns):
            return Joined(None, unit not in self.unjoined)
        stage, own = turns[turn]
        if (unit, stage, own, kind) not in self._have:
            return Joined(None, known=True)
        each = sum(other == stage for other, _ in turns)
        records: list[Record] = self.records.get((unit, stage), [])
        stages = pipeline_of(self.model).all_stages
        held_here = stage in stages[self.manager.pp_rank]
        shards = [getattr(record, kind) for record in records[own::each]] if held_here else []
        sent = {str(index): shard for index, shard in enumerate(shards) if shard is not None}
        held = of_all_stages(sent, self.manager)
        found = [held[n].contiguous() for n in map(str, range(self._micro_batches)) if n in held]
        form = self._form(found[0].shape, shape) if len(found) == self._micro_batches else None
        if form is None or len({shard.shape for shard in found}) > 1:
            self.unjoined[unit] = None
            return Joined(None, known=False)
        return Joined(self._joined(found, form, shape), known=True)

    def _form(self, shard: torch.Size, whole: torch.Size) -> _Form | None:
        """Return the dims in which shards of shape `shard` join to shape `whole`, or None."""
        dims = range(len(whole))
        # If positions are not known, one shard holds all of them.
        layout = contiguous(whole[1] if len(whole) > 2 else 1, 1)
        if self.small.sequences is not None:
            layout = self.small.sequences.layout
        rows, own = self._rows_of_a_shard, layout.local_length
        shares = {own: False}
        if self.manager.tp_size > 1 and own % self.manager.tp_size == 0:
            shares[own // self.manager.tp_size] = True
        if len(shard) != len(whole):
            return None

        def fits(sizes: Mapping[int, tuple[int, int]]) -> bool:
            wanted = {**{d: (whole[d], whole[d]) for d in dims}, **sizes}
            return all((shard[d], whole[d]) == wanted[d] for d in dims)

        pairs = sorted((p, r) for r in dims for p in dims if r != p)
        for p, r in [(1, 0), *pairs] if len(whole) > 1 else ():
            for size, shared in shares.items():
                if fits({r: (rows, self.small.rows), p: (size, layout.length)}):
                    return _Form(r, p, shared=shared)
        for size, shared in shares.items():
            if fits({0: (rows * size, self.small.rows * layout.length)}):
                return _Form(0, None, flat=True, shared=shared)
        return next((_Form(r, None) for r in dims if fits({r: (rows, self.small.rows)})), None)

    @property
    def _micro_batches(self) -> int:
        return len(self.small.micro_batches)

    @property
    def _rows_of_a_shard(self) -> int:
        """The number of rows in one micro-batch of a rank."""
        return self.small.rows // (self.manager.grid.dp * self._micro_batches)

    def _joined(self, shards: list[Tensor], form: _Form, shape: torch.Size) -> Tensor:
        manager, rows, positions = self.manager, form.rows, form.positions
        if form.flat:
            shards = [shard.unflatten(0, (self._rows_of_a_shard, -1)) for shard in shards]
            rows, positions = 0, 1
        whole = torch.cat(shards, rows)
        if form.shared:
            whole = torch.cat(all_gather(whole, manager.tp_group), positions or 0)
        if positions is not None and self.small.sequences is not None and manager.cp_size > 1:
            whole = self.small.sequences.unshard(whole, positions)
        if manager.dp_size > 1:
            whole = torch.cat(all_gather(whole.contiguous(), manager.dp_group), rows)
        return whole.reshape(shape)

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole weights by first name."""
        names = [*names]
        self.meet(f"weights {names[:1]}")
        wanted = self._parameters.keys() & self._named(names)
        return self._whole({n: self._parameters[n].detach() for n in wanted}, names)

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole gradients by first name."""
        names = [*names]
        self.meet(f"gradients {names[:1]}")
        wanted = self._named(names).keys() & self._with_gradient & self._parameters.keys()
        held = {n: torch.zeros_like(self._parameters[n]) for n in wanted}  # a missing one is 0
        for name, gradient in local_gradients(self.model, wanted).items():
            held[name] = gradient if gradient.layout is torch.strided else gradient.to_dense()
        return self._whole(held, names)

    def _named(self, names: Iterable[str]) -> dict[str, str]:
        """Map every name of these weights to its first name."""
        return {name: first for first in names for name in self.plain.names[first]}

    def _whole(self, held: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Gather whole tensors from the ranks' shards, by first name."""
        first, names = self._named(names), [n for n in self._parameters if n in held]
        stage = gather_stage(self.model, {n: held[n] for n in names}, self.manager)
        whole = of_all_stages(stage, self.manager)
        return {first[n]: t.to(self.device) for n, t in whole.items() if n in first}


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps

"""Gather whole hidden states, weights and gradients of the small step from all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...dist import all_gather, all_gather_object, all_reduce, get_comm_device
from ...parallel.pg_manager import ProcessGroupManager
from ..forward import pipeline_of
from ..plain import Plain
from ..state import gather_stage, local_gradients, of_all_stages
from .batch import SmallBatch
from .training import Record, Records

_KINDS = ("input", "output", "input_gradient", "output_gradient")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class DivergedError(Exception):
    """An error of ranks that cannot go on with a rehearsal together."""


class Joined(NamedTuple):
    """A whole tensor, joined from the ranks' shards; `known` if it was joined or no rank has it."""

    tensor: Tensor | None
    known: bool


class _Form(NamedTuple):
    """The dims of a tensor that hold rows and positions."""

    rows: int
    positions: int | None
    shared: bool = False  # each tp rank has a shard of the positions
    flat: int = 0  # of tokens [B * L, ...]: the rows of a shard in its first dim


class _Turn(NamedTuple):
    """A call of a unit in one forward."""

    stage: int
    number: int  # among the unit's calls on this stage
    kinds: frozenset[str]  # the tensors that all ranks of the stage have, of each micro-batch


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
    _turns: dict[str, list[_Turn]] = field(default_factory=dict)
    _trained: dict[str, bool] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)
    _alone: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Exchange between all ranks which calls, tensors and gradients they have."""
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._first = {n: first for first, names in self.plain.names.items() for n in names}
        calls = {
            key: [[kind for kind in _KINDS if getattr(r, kind) is not None] for r in records]
            for key, records in self.records.items()
        }
        facts = {n: (p.requires_grad, p.grad is not None) for n, p in self._parameters.items()}
        alone = {u: all(r.alone for r in held) for (u, _), held in self.records.items()}
        floating = [p.dtype for p in self._parameters.values() if p.is_floating_point()]
        dtype = max(floating, key=_eps, default=torch.float64)
        own = calls, facts, alone, dtype
        everyone = all_gather_object(own, self.manager.world_group)
        self.dtype = max((theirs for *_, theirs in everyone), key=_eps)
        self._settle_calls([their for their, *_ in everyone])
        for _, of_names, of_units, _ in everyone:
            for name, (trains, has_gradient) in of_names.items():
                if has_gradient:
                    self._with_gradient.add(name)
                if name in self._first:
                    self._trained[self._first[name]] = trains
            for name, holds in of_units.items():
                self._alone[name] = self._alone.get(name, True) and holds

    def _settle_calls(self, everyone: Sequence[Mapping[tuple[str, int], list[list[str]]]]) -> None:
        """Record each unit's calls in one forward, and the tensors of each that all ranks have."""
        for name, stage in sorted({key for calls in everyone for key in calls}, key=lambda k: k[1]):
            held = [calls[name, stage] for calls in everyone if (name, stage) in calls]
            each, rest = divmod(len(held[0]), self._micro_batches)
            if rest or len({len(kinds) for kinds in held}) > 1:
                self.unjoined[name] = None
                continue
            for index in range(each):
                lists = [kinds for theirs in held for kinds in theirs[index::each]]
                kinds = frozenset(_KINDS).intersection(*lists)
                self._turns.setdefault(name, []).append(_Turn(stage, index, kinds))

    def returns_alone(self, name: str) -> bool:
        """Return whether a unit, called once, returns hidden states and does nothing else."""
        weights, owners = {*self.plain.owners[name]}, self.plain.owners.items()
        shares = any(weights & {*theirs} for other, theirs in owners if other != name)
        hooked = any(getattr(m, k) for m in self.plain.units[name].modules() for k in _HOOKS)
        alone = self._alone.get(name, False) and name not in self.unjoined
        return alone and len(self._turns.get(name, ())) == 1 and not shares and not hooked

    def meet(self, where: str, *, failed: bool = False) -> None:
        """Check that all ranks are at the same place before they communicate; all raise if not."""
        place = zlib.crc32(where.encode())
        group = self.manager.world_group
        told = torch.tensor([failed, place, -place], device=get_comm_device(group))
        all_reduce(told, "max", group=group)
        stopped, most, least = told.tolist()
        if stopped or most != -least:
            raise DivergedError("it ran otherwise on other ranks")

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
        stage, own, kinds = turns[turn]
        if kind not in kinds:
            return Joined(None, known=True)
        each = sum(other.stage == stage for other in turns)
        records: list[Record] = []
        if stage in pipeline_of(self.model).all_stages[self.manager.pp_rank]:
            records = self.records.get((unit, stage), [])[own::each]
        sent = {str(n): x for n, r in enumerate(records) if (x := getattr(r, kind)) is not None}
        held = of_all_stages(sent, self.manager)
        found = [held[n].contiguous() for n in map(str, range(self._micro_batches)) if n in held]
        form = self._form(found[0].shape, shape) if len(found) == self._micro_batches else None
        if form is None or len({shard.shape for shard in found}) > 1:
            self.unjoined[unit] = None
            return Joined(None, known=False)
        return Joined(self._joined(found, form), known=True)

    def _form(self, shard: torch.Size, whole: torch.Size) -> _Form | None:
        """Return the dims in which shards of shape `shard` join to shape `whole`, or None."""
        dims, tp = range(len(whole)), self.manager.tp_size
        if len(shard) != len(whole):
            return None
        # If positions are not known, one shard holds all of them.
        own = length = whole[1] if len(whole) > 2 else 1
        if self.small.sequences is not None:
            layout = self.small.sequences.layout
            own, length = layout.local_length, layout.length
        rows = self.small.rows // (self.manager.grid.dp * self._micro_batches), self.small.rows
        shares = [(own, False), *([(own // tp, True)] if tp > 1 and own % tp == 0 else [])]

        def fits(sizes: Mapping[int, tuple[int, int]]) -> bool:
            return all((shard[d], whole[d]) == sizes.get(d, (whole[d], whole[d])) for d in dims)

        pairs = sorted((p, r) for r in dims for p in dims if r != p)
        for p, r in [(1, 0), *pairs] if len(whole) > 1 else ():
            for size, shared in shares:
                if fits({r: rows, p: (size, length)}):
                    return _Form(r, p, shared)
        for size, shared in shares:
            if fits({0: (rows[0] * size, rows[1] * length)}):
                return _Form(0, 1, shared, flat=rows[0])
        return next((_Form(r, None) for r in dims if fits({r: rows})), None)

    @property
    def _micro_batches(self) -> int:
        return len(self.small.micro_batches)

    def _joined(self, shards: list[Tensor], form: _Form) -> Tensor:
        manager, positions = self.manager, form.positions
        if form.flat:
            shards = [shard.unflatten(0, (form.flat, -1)) for shard in shards]
        whole = torch.cat(shards, form.rows)
        if form.shared:
            whole = torch.cat(all_gather(whole, manager.tp_group), positions or 0)
        if positions is not None and self.small.sequences is not None and manager.cp_size > 1:
            whole = self.small.sequences.unshard(whole, positions)
        if manager.dp_size > 1:
            whole = torch.cat(all_gather(whole.contiguous(), manager.dp_group), form.rows)
        return whole.flatten(0, 1) if form.flat else whole

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

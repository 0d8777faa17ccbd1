"""Refuse changes that a forward makes to its model unless one process makes the same.

These are of buffers and parameters. Numbers and texts that a module keeps as plain attributes are
left to the rehearsal, which shows whether forwards compute otherwise by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...dist import all_gather_object
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ...parallel.pg_manager.building import divided_modules, eagerly
from ...parallel.tensor_parallel import TensorParallelLayer
from ...parallel.tensor_parallel.building import find_cuts
from ..digests import as_numbers, digest
from ..experts import expert_names
from ..forward import pipeline_of, wait_for_parameters

_BUFFER, _PARAMETER = "buffer", "parameter"
_WAY_OUT = {
    _BUFFER: (
        "In one process it would follow the whole batch. Keep such a buffer out of the forward, "
        "update it after the step from what all ranks have, or leave the module in eval mode"
    ),
    _PARAMETER: (
        "In one process it would change once, by the whole batch. Change it after "
        "optimizer.step(), on all ranks alike, or let forward use what it makes of it "
        "(weight.clamp(...), torch.nn.utils.parametrize)"
    ),
}
# Axes whose ranks should hold the same values -> in what these ranks differ.
_ALIKE = {
    ("dp", "cp"): "other rows or positions",
    ("tp",): "other shards of features or tokens",
    ("pp",): "other stages, which share it,",
}
Key = tuple[str, str]  # kind and name
Looks = dict[Key, int]  # digests of their values


class _Changes:
    """How a model looks before its forwards, and after each."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _looks(model)
        self._after_each: list[Looks] = []

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and note how all looks after it."""
        output = forward(*args, **kwargs)
        self._after_each.append(_looks(self._model))
        return output

    def found(self) -> tuple[Looks, list[Key]]:
        """Return the present looks of all that changed, and what changed more than once."""
        last, first = _looks(self._model), Looks()
        for looks in (*self._after_each, last):
            first = {key: x for key, x in looks.items() if self._before.get(key) != x} | first
        changed = {key: last[key] for key in first if key in last}
        return changed, [key for key, look in changed.items() if first[key] != look]


def _looks(model: nn.Module) -> Looks:
    """Return the digest of every parameter and buffer that has values."""
    named: list[tuple[Key, Tensor]] = [
        *(((_PARAMETER, name), parameter) for name, parameter in model.named_parameters()),
        *(((_BUFFER, name), buffer) for name, buffer in model.named_buffers()),
    ]
    plain = {key: x.detach() for key, x in named if not x.is_meta}
    strided = {k: x for k, x in plain.items() if type(x) is Tensor and x.layout is torch.strided}
    return dict(zip(strided, as_numbers(map(digest, strided.values())), strict=True))


@contextmanager
def changes_followed(
    model: nn.Module, num_micro_batches: int, manager: ProcessGroupManager
) -> Iterator[None]:
    """Find out in a step whether forwards change the model otherwise than one process's would.

    Reads the model once before the step and after each forward, and exchanges the digests of what
    has changed.

    Raises:
        InvalidArgumentError: Ranks that should hold the same buffer or parameter hold others, or
            it depends on the number of micro-batches; on every rank, at the end of the step.
    """
    wait_for_parameters(model)  # which are read as they come
    changes = _Changes(model)
    # Not a hook, which would be the plain model's own.
    model.forward = partial(changes.around, model.forward)
    try:
        with eagerly():
            yield
    finally:
        del model.forward
    looks, again = changes.found()
    cuts = find_cuts(model).keys() if manager.tp_size > 1 else ()
    shards, experts = frozenset({*cuts, *_buffers_of_shards(model)}), expert_names(model)
    unlike, runs = _unlike(looks, shards, experts, manager), _runs(model, num_micro_batches)
    wrong = [
        f"{kind} {name} by what it sees, and ranks of {whose} now hold other values of it. "
        f"{_WAY_OUT[kind]}"
        for (kind, name), whose in unlike.items()
    ]
    wrong += [
        f"{kind} {name} each time that it runs, and {runs} it several times for one batch. "
        f"{_WAY_OUT[kind]}"
        for kind, name in again
    ]
    said = f"{describe_rank()}: the forward changes {wrong[0]}" if wrong else ""
    error = InvalidArgumentError(said) if wrong else None
    agree("what the first step has changed", [], manager.world_group, error=error)


def _unlike(
    looks: Looks, shards: Set[str], experts: Set[str], manager: ProcessGroupManager
) -> dict[Key, str]:
    """Return what looks otherwise on ranks that should have the same, and on which ranks."""
    everyone = all_gather_object((looks, {*shards}, {*experts}), manager.world_group)
    keys = dict.fromkeys(key for theirs, *_ in everyone for key in theirs)
    found: dict[Key, str] = {}
    for axes, whose in _ALIKE.items():
        for kind, name in keys:
            held: dict[Any, set[int | None]] = {}
            for rank, (theirs, divided, own) in enumerate(everyone):
                elsewhere = axes == ("pp",) and (kind != _BUFFER or (kind, name) not in theirs)
                if elsewhere or name in own or (axes == ("tp",) and name in divided):
                    continue
                place = manager.grid.coordinates(rank)._replace(**dict.fromkeys(axes, 0))
                held.setdefault(place, set()).add(theirs.get((kind, name)))
            if any(len(each) > 1 for each in held.values()):
                found.setdefault((kind, name), whose)
    return found


def _buffers_of_shards(model: nn.Module) -> Iterator[str]:
    """Yield the buffers of modules that each tp rank has a shard of."""
    divided = {*divided_modules(model)}
    for name, module in model.named_modules():
        if isinstance(module, TensorParallelLayer) or module in divided:
            yield from (f"{name}.{own}" for own in module._buffers)


def _runs(model: nn.Module, num_micro_batches: int) -> str:
    """Return what runs a forward several times."""
    if num_micro_batches > 1:
        return f"{num_micro_batches} micro-batches run"
    if len(pipeline_of(model).stages) > 1:
        return "the stages of a rank run"
    return "a backward that recomputes runs"

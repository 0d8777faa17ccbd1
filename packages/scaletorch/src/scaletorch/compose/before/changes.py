"""Refuse changes that a forward makes to its model unless one process makes the same.

These are of buffers and parameters. Numbers and texts that a module keeps as plain attributes are
left to the rehearsal, which shows whether forwards compute otherwise by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ...dist import all_gather_object
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ...parallel.pg_manager.building import divided_modules, eagerly
from ...parallel.tensor_parallel import TensorParallelLayer
from ...parallel.tensor_parallel.building import find_cuts
from ..digests import written
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
_OUTSIDE = -1  # torch's number for "no backward is running on this thread"
Key = tuple[str, str]  # kind and name
Looks = dict[Key, str]  # how their values look


class _Writes(TorchDispatchMode):
    """Sees every operation of forwards that writes, also those on `.data`, which raise no version.

    Args:
        model: The model whose parameters and buffers are followed.

    Attributes:
        written: Names of what an operation wrote to.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int, list[tuple[int, int, str]]] = {}  # storage -> first, end, name
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if _is_strided(tensor):
                first = tensor.data_ptr()
                end = first + tensor.numel() * tensor.element_size()
                self._places.setdefault(_storage(tensor), []).append((first, end, name))
        self._parameters = dict(model.named_parameters())
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self.written: set[str] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and torch._C._current_graph_task_id() == _OUTSIDE:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            for argument in func._schema.arguments:
                if argument.is_write:
                    self._note((given | dict(kwargs)).get(argument.name))
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Let parameters hold again what they held before they were written to."""
        with torch.no_grad():
            for parameter, before in self._before.values():
                parameter.copy_(before)

    def _note(self, value: Any) -> None:
        names = {
            name
            for tensor in (value if isinstance(value, list | tuple) else [value])
            if _is_strided(tensor)
            for first, end, name in self._places.get(_storage(tensor), ())
            if first <= tensor.data_ptr() < end
        }
        self.written |= names
        for name in names & self._parameters.keys() - self._before.keys():
            parameter = self._parameters[name]
            self._before[name] = parameter, parameter.detach().clone()


class _Changes:
    """The changes that forwards have made, and the values after each forward."""

    def __init__(self, model: nn.Module, writes: _Writes) -> None:
        self.model, self.writes = model, writes
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.before = {name: (t, _version(t), _address(t)) for name, t in named}
        self.after_each: list[Looks] = []
        self.replaced: set[str] = set()  # parameters that have other values otherwise

    def now(self) -> Looks:
        """Return how all looks that forwards have changed since the start."""
        of_forward = self.writes.written | self.replaced
        looks = {
            (_PARAMETER, name): written(parameter.detach())
            for name, parameter in self.model.named_parameters()
            if name in of_forward
        }
        looks |= {
            (_BUFFER, name): written(buffer)
            for name, buffer in self.model.named_buffers()
            if name in of_forward or self._is_other(name, buffer)
        }
        return looks

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and note how all looks after it."""
        output = forward(*args, **kwargs)
        self.note()
        return output

    def note(self) -> None:
        """Note how all looks after a forward."""
        others = {n for n, each in self.model.named_parameters() if self._is_other(n, each)}
        self.replaced |= others
        self.after_each.append(self.now())

    def again(self) -> list[Key]:
        """Return what changed again after the first forward that changed it."""
        last = self.now()
        first: Looks = {}
        for looks in self.after_each:
            first = looks | first
        return [key for key, look in last.items() if first.get(key, look) != look]

    def _is_other(self, name: str, tensor: Tensor) -> bool:
        old, version, address = self.before.get(name, (None, 0, 0))
        return old is not tensor or version != _version(tensor) or address != _address(tensor)


@contextmanager
def changes_followed(
    model: nn.Module,
    num_micro_batches: int,
    manager: ProcessGroupManager,
    *,
    put_back: bool = False,
) -> Iterator[None]:
    """Find out in a step whether forwards change the model otherwise than one process's would.

    Costs a look at each operation of the forwards, and one exchange of the digests of what has
    changed; with `put_back` parameters are as before in the end.

    Raises:
        InvalidArgumentError: Ranks that should hold the same buffer or parameter hold others, or
            it depends on the number of micro-batches; on every rank, at the end of the step.
    """
    wait_for_parameters(model)  # which are written to as they come
    writes = _Writes(model)
    changes = _Changes(model, writes)
    # Not a hook, which would be the plain model's own.
    model.forward = partial(changes.around, model.forward)
    try:
        with eagerly(), writes:
            yield
    finally:
        del model.forward
    looks, again = changes.now(), changes.again()
    if put_back:
        writes.put_back()
    cuts = find_cuts(model).keys() if manager.tp_size > 1 else ()
    shards, experts = frozenset({*cuts, *_buffers_of_shards(model)}), expert_names(model)
    unlike, runs = _unlike(looks, shards, experts, manager), _runs(model, num_micro_batches)
    wrong = [_by_what_it_sees(kind, name, whose) for (kind, name), whose in unlike.items()]
    wrong += [_several_times(kind, name, runs) for kind, name in again]
    error = InvalidArgumentError(f"{describe_rank()}: {wrong[0]}") if wrong else None
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
            held: dict[Any, set[str | None]] = {}
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


def _by_what_it_sees(kind: str, name: str, whose: str) -> str:
    return (
        f"the forward changes {kind} {name} by what it sees, and ranks of {whose} now hold other "
        f"values of it. {_WAY_OUT[kind]}"
    )


def _several_times(kind: str, name: str, runs: str) -> str:
    return (
        f"the forward changes {kind} {name} each time that it runs, and {runs} it several times "
        f"for one batch. {_WAY_OUT[kind]}"
    )


def _runs(model: nn.Module, num_micro_batches: int) -> str:
    """Return what runs a forward several times."""
    if num_micro_batches > 1:
        return f"{num_micro_batches} micro-batches run"
    if len(pipeline_of(model).stages) > 1:
        return "the stages of a rank run"
    return "a backward that recomputes runs"


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided

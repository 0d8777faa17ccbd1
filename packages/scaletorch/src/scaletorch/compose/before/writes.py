"""Operations of a forward that write to its model, or look at all ids of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_OUTSIDE = -1  # torch's number for "no backward is running on this thread"
_BY_FREQUENCY = {"embedding": 3, "_embedding_bag": 3}  # where that argument is


class Writes(TorchDispatchMode):
    """Sees every operation of forwards, also those on `.data`, which raise no version.

    Args:
        model: The model whose parameters and buffers are followed.

    Attributes:
        written: Names of what an operation wrote to.
        renormed: Names of tables whose rows were shortened as they were looked up.
        by_frequency: Names of tables whose gradient is divided by how often an id occurs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int, list[tuple[int, int, str]]] = {}  # storage -> first, end, name
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if _is_plain(tensor):
                first = tensor.data_ptr()
                end = first + tensor.numel() * tensor.element_size()
                self._places.setdefault(_storage(tensor), []).append((first, end, name))
        self._parameters = dict(model.named_parameters())
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self.written: set[str] = set()
        self.renormed: set[str] = set()
        self.by_frequency: set[str] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() == _OUTSIDE:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Let parameters hold again what they held before they were written to."""
        with torch.no_grad():
            for parameter, before in self._before.values():
                parameter.copy_(before)

    def _note(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        kind = func._schema.name.removeprefix("aten::")
        place = _BY_FREQUENCY.get(kind)
        if place is not None and len(args) > place and args[place] and args[0].requires_grad:
            self.by_frequency.update(self._names_of(args[0]) or {"a table"})
        if not func._schema.is_mutable:
            return
        into = self.renormed if kind == "embedding_renorm_" else self.written
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write:
                self._write(into, value)
        for argument in func._schema.arguments:
            if argument.is_write and argument.name in kwargs:
                self._write(into, kwargs[argument.name])

    def _write(self, into: set[str], value: Any) -> None:
        names = self._names_of(value)
        into.update(names)
        for name in names & self._parameters.keys() - self._before.keys():
            parameter = self._parameters[name]
            self._before[name] = parameter, parameter.detach().clone()

    def _names_of(self, value: Any) -> set[str]:
        tensors = value if isinstance(value, list | tuple) else [value]
        return {
            name
            for tensor in tensors
            if _is_plain(tensor)
            for first, end, name in self._places.get(_storage(tensor), ())
            if first <= tensor.data_ptr() < end
        }


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided

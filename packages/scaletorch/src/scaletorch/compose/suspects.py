"""Which module of a model did not move its outputs with its inputs."""

from __future__ import annotations

from collections import defaultdict
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..parallel.context_parallel.models.backward import tensors_in
from .look import apart


class Call(NamedTuple):
    """One call of a module.

    Attributes:
        name: The module's.
        given: The tensors that it was given.
        made: Those that it returned.
    """

    name: str
    given: tuple[Tensor, ...]
    made: tuple[Tensor, ...]


class Calls:
    """Writes down all calls of a model's modules, as they end, while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self.made: list[Call] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Calls:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def write(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = (*tensors_in(args), *tensors_in(kwargs))
            self.made.append(Call(name, tuple(given), tuple(tensors_in(output))))

        return write


def find_suspect(calls: Calls, length: int, shift: int) -> str | None:
    """Return the first module that mixes positions, in words; None if none is to be seen here.

    Args:
        calls: Of three runs: the first and the second as the batch is, the third moved.
        length: Positions of the batch.
        shift: By how many they were moved.
    """
    by_name: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls.made:
        by_name[call.name].append(call)
    seen: defaultdict[str, int] = defaultdict(int)
    for call in calls.made:
        third = len(by_name[call.name]) // 3
        index, seen[call.name] = seen[call.name], seen[call.name] + 1
        if index >= third:
            continue
        moved = by_name[call.name][index + 2 * third]
        if not _moves(call.given, moved.given, length, shift):
            return f"what {_named(call.name, calls)} is given"
        if not _moves(call.made, moved.made, length, shift):
            return _named(call.name, calls)
    return None


def _named(name: str, calls: Calls) -> str:
    kind = calls.kinds[name]
    return f"module {name} ({kind})" if name else f"the forward of {kind}"


def _moves(a: tuple[Tensor, ...], b: tuple[Tensor, ...], length: int, shift: int) -> bool:
    """Tell whether tensors with a dim of positions moved with them; others are not asked."""
    return len(a) != len(b) or all(_moved(x, y, length, shift) for x, y in zip(a, b, strict=True))


def _moved(a: Tensor, b: Tensor, length: int, shift: int) -> bool:
    dims = [dim for dim, size in enumerate(a.shape) if size == length]
    if a.shape != b.shape or not dims:
        return True
    kept = length - shift
    return any(not apart(a.narrow(dim, shift, kept), b.narrow(dim, 0, kept)) for dim in dims)

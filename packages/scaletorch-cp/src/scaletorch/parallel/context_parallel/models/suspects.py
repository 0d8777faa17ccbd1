"""Which module of a model is the first whose outputs are not what its inputs make them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....dist.building import tensors_in


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


def find_suspect(calls: Calls, same: Callable[[Tensor, Tensor], bool]) -> str | None:
    """Return the first module that mixes positions, in words; None if none is to be seen here.

    Args:
        calls: Of three runs: the first and the second as the batch is, the third changed.
        same: Tells of a tensor of the first and of the third run whether it holds what it must.
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
        changed = by_name[call.name][index + 2 * third]
        if not _all_same(call.given, changed.given, same):
            return f"what {_named(call.name, calls)} is given"
        if not _all_same(call.made, changed.made, same):
            return _named(call.name, calls)
    return None


def _named(name: str, calls: Calls) -> str:
    kind = calls.kinds[name]
    return f"module {name} ({kind})" if name else f"the forward of {kind}"


def _all_same(
    a: tuple[Tensor, ...], b: tuple[Tensor, ...], same: Callable[[Tensor, Tensor], bool]
) -> bool:
    return len(a) != len(b) or all(same(x, y) for x, y in zip(a, b, strict=True))

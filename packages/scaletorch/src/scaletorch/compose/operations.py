"""The operations of a forward: which are cheap, what they write to, and how to run them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..dist.building import tensors_in

# Beside elementwise operations and views.
_CHEAP = {
    "_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "cat", "clone", "constant_pad_nd",
    "flip", "native_layer_norm", "repeat", "roll", "stack", "tril", "triu",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Tells of the operations that run: of cheap ones that autograd sees, and of all writes.

    What autograd's functions run inside is theirs.

    Args:
        note: Called with an operation, its arguments, its keywords and what it returned.
        write: Called with the tensors that are about to be written to.
    """

    def __init__(
        self, note: Callable[[Any, Any, Any, Any], None], write: Callable[[Any], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._write = note, write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if written := _written(func, args, kwargs):
            self._write(written)
        out = func(*args, **kwargs)
        if torch.is_grad_enabled() and _is_cheap(func) and next(tensors_in(kwargs), None) is None:
            self._note(func, args, kwargs, out)
        return out


def repeated(
    func: Any, args: Any, kwargs: Any, taken: list[Tensor]
) -> Callable[[int | None, Sequence[Tensor]], Tensor]:
    """Return what runs an operation again, of other tensors; `taken` gets those of now.

    It is called with which of several results is wanted, None if there is one, and the tensors.
    """
    return partial(_run, func, _without(args, taken), kwargs)


def _run(func: Any, others: Any, kwargs: Any, at: int | None, sources: Sequence[Tensor]) -> Tensor:
    out = func(*_with(others, iter(sources)), **kwargs)
    made: Tensor = out if at is None else out[at]
    return made


@cache
def _is_cheap(func: Any) -> bool:
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    views = any(each.alias_info for each in schema.returns)
    name = schema.name.removeprefix("aten::")
    return views or torch.Tag.pointwise in func.tags or name in _CHEAP


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> Sequence[Any]:
    """Return the arguments that an operation writes to; a collective's schema does not say it."""
    if func.namespace == "c10d":
        return args[:1]
    at, names = _writing(func)
    return [*(args[index] for index in at if index < len(args)), *map(kwargs.get, names)]


@cache
def _writing(func: Any) -> tuple[list[int], list[str]]:
    """Return the places and the names of the arguments that an operation writes to."""
    given = enumerate(func._schema.arguments)
    found = [(at, each.name) for at, each in given if each.alias_info and each.alias_info.is_write]
    return [at for at, _ in found], [name for _, name in found]


def _without(value: Any, taken: list[Tensor]) -> Any:
    """Return arguments with a mark for every tensor, which are taken out."""
    if isinstance(value, Tensor):
        taken.append(value)
        return Tensor
    return [_without(each, taken) for each in value] if isinstance(value, (list, tuple)) else value


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return arguments with a tensor for every mark."""
    if value is Tensor:
        return next(tensors)
    return [_with(each, tensors) for each in value] if isinstance(value, list) else value

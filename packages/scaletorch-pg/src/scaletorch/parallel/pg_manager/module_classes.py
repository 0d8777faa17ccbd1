"""A module's class replaced by a subclass of it that a strategy makes, and copies of the module."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

_SUBCLASSES: dict[tuple[type[nn.Module], type[nn.Module], str], type[Any]] = {}


def class_before(mixin: type[nn.Module], own: type[nn.Module], name: str) -> type[Any]:
    """Return the class of that name of a mixin and then a module's own class.

    It is made once, so that modules of one class stay of one class.
    """
    key = mixin, own, name
    if key not in _SUBCLASSES:
        # Who asks where a class comes from means the module's own one.
        place = {"__module__": own.__module__, "__doc__": own.__doc__}
        _SUBCLASSES[key] = types.new_class(
            name, (mixin, own), exec_body=lambda namespace: namespace.update(place)
        )
    return _SUBCLASSES[key]


def deep_copy(module: M, own: Callable[[Any], M] | None, memo: dict[int, Any]) -> M:
    """Return a deep copy of a module that refuses to be pickled, which copies are made by.

    Args:
        module: Of a class that a strategy made.
        own: The `__deepcopy__` of the module's own class, if it has one.
        memo: What has been copied.
    """
    return own(memo) if own is not None else _twin(module, partial(copy.deepcopy, memo=memo), memo)


def shallow_copy(module: M) -> M:
    """Return a shallow copy of such a module."""
    return _twin(module, dict, {})


def _twin(module: M, copied: Callable[[Any], Any], memo: dict[int, Any]) -> M:
    twin: M = object.__new__(type(module))
    memo[id(module)] = twin
    state: Any = module.__getstate__()  # type: ignore[no-untyped-call]
    twin.__setstate__(copied(state))  # type: ignore[no-untyped-call]
    return twin

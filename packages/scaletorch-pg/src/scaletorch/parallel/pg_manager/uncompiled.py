"""Functions that `torch.compile` must not trace: they communicate or use other random streams.

Each call of such a function is a graph break.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_hides: list[Callable[[], None]] = []  # each hides one decorated function from the compiler


def uncompiled(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that neither it nor the functions it calls are compiled."""
    return _outside(call, recursive=True)


def around_compiled(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it is not compiled, but the functions it calls are."""
    return _outside(call, recursive=False)


def _outside(call: Callable[P, R], recursive: bool) -> Callable[P, R]:
    # `torch.compiler.disable` imports the compiler at decoration, which takes seconds even in a
    # program that never compiles. So decoration waits for the compiler: it traces the first call
    # of `outside`, takes the `is_compiling` branch, and cannot trace `_hide_all`. That frame then
    # runs in Python and hides every decorated function at once; otherwise each function would
    # cost a graph and a graph break at its own first call.
    hidden: list[Callable[P, R]] = []

    def hide() -> None:
        dynamo = importlib.import_module("torch._dynamo.decorators")
        dynamo.skip(outside)  # from now on this wrapper is not traced either
        hidden[:] = [dynamo.disable(call) if recursive else dynamo.skip(call)]

    @functools.wraps(call)
    def outside(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # the first time, and after a reset of the compiler
            _hide_all()
        return hidden[0](*args, **options) if hidden else call(*args, **options)

    _hides.append(hide)
    return outside


def _hide_all() -> None:
    for hide in _hides:
        hide()

"""Functions that `torch.compile` leaves to Python: they communicate, or draw from other streams.

The graph ends before a call of one and another begins behind it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_hides: list[Callable[[], None]] = []  # tell the compiler to leave what is decorated here alone


def uncompiled(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate what is not compiled, nor anything that it calls."""
    return _outside(call, recursive=True)


def around_compiled(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate what is not compiled itself, while what it calls is."""
    return _outside(call, recursive=False)


def _outside(call: Callable[P, R], recursive: bool) -> Callable[P, R]:
    # `torch.compiler.disable` imports the compiler when it decorates, which takes seconds of every
    # program that never compiles. So decorating waits until the compiler is there: it traces the
    # first call of `outside`, finds `is_compiling` true, and meets `_hide_all`, which it cannot
    # trace. That frame then runs in Python, and hides every decorated function, since one that
    # was not called yet would cost a graph and a break of its own.
    hidden: list[Callable[P, R]] = []

    def hide() -> None:
        dynamo = importlib.import_module("torch._dynamo.decorators")
        dynamo.skip(outside)  # from now on this wrapper itself is not traced either
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

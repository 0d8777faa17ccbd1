"""What `torch.compile` leaves to Python: tokens on their way, and experts on those that came."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_hidden: dict[Callable[..., Any], Callable[..., Any]] = {}


def call_uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call what is not compiled, nor anything that it calls: a graph ends here.

    `torch.compiler.disable` imports the compiler, which takes seconds of every program that never
    compiles. So it waits until the compiler is there: that cannot trace `_hide`, and runs it.
    """
    if torch.compiler.is_compiling() and call not in _hidden:
        _hide(call)
    return _hidden.get(call, call)(*args)


def _hide(call: Callable[..., Any]) -> None:
    _hidden[call] = importlib.import_module("torch._dynamo.decorators").disable(call)

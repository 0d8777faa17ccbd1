"""Twins of another stage's modules: of the same class, with stand-ins as tensors.

A model's code does more with a module than call it: it looks for adapters in a layer, switches its
kind of attention, or calls a method that embeds other positions. The module's twin answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..runtime.forms import PLAIN
from .stand_ins import META, Forward, stand_in_of

_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_DATA = (*PLAIN, torch.dtype, torch.device, torch.Size)


def twin_of(module: nn.Module, forward: Forward, keeps: Callable[[Any], bool]) -> nn.Module:
    """Return a module's twin, without hooks, and without references to the module's tensors.

    It has the attributes whose value `keeps` accepts; lists, dicts and sets are copied.
    """
    kind = nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)
    twin: nn.Module = object.__new__(kind)
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        if name not in _OF_ANY_MODULE and keeps(value):
            vars(twin)[name] = copy(value) if isinstance(value, list | dict | set) else value
    for own, theirs in _tensors(twin, module):
        for name, tensor in theirs.items():
            if tensor is None or not is_lazy(tensor):
                own[name] = None if tensor is None else _without_values(tensor, forward)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else twin_of(child, forward, keeps)
    return twin


def cast(twin: nn.Module, forward: Forward, fn: Callable[[Tensor], Tensor]) -> None:
    """Give the tensors of a twin the dtype and the device of the function's results."""
    for module in twin.modules():
        for own, _ in _tensors(module, module):
            for name, tensor in own.items():
                if tensor is not None:
                    like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                    own[name] = _without_values(tensor, forward, like)


def runs_plain_forward(module: nn.Module) -> bool:
    """Return whether a call of the module returns the same form as its twin's forward.

    True if no module inside has forward hooks or another forward than its class's; wrappers that
    set `__wrapped__` (`functools.wraps`) are seen through.
    """
    for inner in module.modules():
        scripted = isinstance(inner, torch.jit.ScriptModule)
        if scripted or inner._forward_hooks or inner._forward_pre_hooks:
            return False
        forward = inspect.unwrap(getattr(inner.forward, "__func__", inner.forward))
        if forward is not inspect.unwrap(type(inner).forward):
            return False
    return True


def _tensors(one: nn.Module, other: nn.Module) -> list[tuple[Any, Any]]:
    return [(one._parameters, other._parameters), (one._buffers, other._buffers)]


def _without_values(tensor: Tensor, forward: Forward, like: Tensor | None = None) -> Any:
    like = tensor if like is None else like
    form = torch.empty(tensor.shape, dtype=like.dtype, device=META)
    standing = stand_in_of(form, like.device, forward, None)
    # This makes isinstance(standing, nn.Parameter) true.
    standing._is_param = isinstance(tensor, nn.Parameter)
    return standing


def is_data(value: Any) -> bool:
    """Return whether a value is plain data, a plain function, a class, or a tuple of these."""
    # Other objects may hold tensors, or be changed by a forward on another rank.
    if isinstance(value, tuple):
        return all(map(is_data, value))
    if inspect.isfunction(value):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__closure__ is None and is_data(defaults)
    return isinstance(value, (*_DATA, type))

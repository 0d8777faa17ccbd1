"""Modules of other stages without their values: their data, their parts and their methods.

A model's code asks more of a module than its forward: what adapters there are in a layer, that it
change the kind of its attention, that it embed other positions. A twin answers: a module of the
same class, whose tensors have a form alone.
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
from .stand_ins import Forward, standing_of_module

_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_DATA = (*PLAIN, torch.dtype, torch.device, torch.Size)


def twin_of(module: nn.Module, forward: Forward, keeps: Callable[[Any], bool]) -> nn.Module:
    """Return a module's twin, which keeps no tensor of it alive. Its hooks are left out.

    Args:
        module: The module.
        forward: The forward that stand-ins of its tensors belong to.
        keeps: Which attributes it has too; of lists, dicts and sets a copy.
    """
    kind = nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)
    twin: nn.Module = object.__new__(kind)
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        if name not in _OF_ANY_MODULE and keeps(value):
            vars(twin)[name] = copy(value) if isinstance(value, list | dict | set) else value
    for own, theirs in _tensors(twin, module):
        for name, tensor in theirs.items():
            known = tensor is not None and not is_lazy(tensor)
            if known or tensor is None:
                own[name] = None if tensor is None else _without_values(tensor, forward)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else twin_of(child, forward, keeps)
    return twin


def cast(twin: nn.Module, forward: Forward, fn: Callable[[Tensor], Tensor]) -> None:
    """Let the tensors of a twin have the dtype and the device that a function gives to tensors."""
    for module in twin.modules():
        for own, _ in _tensors(module, module):
            for name, tensor in own.items():
                if tensor is not None:
                    like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                    own[name] = _without_values(tensor, forward, like)


def runs_alike(module: nn.Module) -> bool:
    """Return whether what calling the module returns has the form that a twin's forward returns.

    So it is if nothing was put around its parts but wrappers that say what they wrap.
    """
    return not any(
        each._forward_hooks or each._forward_pre_hooks or not _has_own_forward(each)
        for each in module.modules()
    )


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether its forward is that of its class."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    own = inspect.unwrap(type(module).forward)
    return inspect.unwrap(getattr(module.forward, "__func__", module.forward)) is own


def _tensors(one: nn.Module, other: nn.Module) -> list[tuple[Any, Any]]:
    return [(one._parameters, other._parameters), (one._buffers, other._buffers)]


def _without_values(tensor: Tensor, forward: Forward, like: Tensor | None = None) -> Any:
    like = tensor if like is None else like
    made = standing_of_module(tuple(tensor.shape), like.dtype, like.device, forward)
    made._is_param = isinstance(tensor, nn.Parameter)  # so that it counts as one, as torch has it
    return made


def is_data(value: Any) -> bool:
    """Return whether a value is plain data, a plain function or a class, or a tuple of such.

    Others may hold tensors, or be changed by a forward that runs elsewhere.
    """
    if isinstance(value, tuple):
        return all(map(is_data, value))
    if inspect.isfunction(value):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__closure__ is None and is_data(defaults)
    return isinstance(value, (*_DATA, type))

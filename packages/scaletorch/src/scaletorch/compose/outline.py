"""The outline of a plain model: its modules, and the forms of their tensors without memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..parallel.tensor_parallel.building import layer_of

_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def base_of(model: nn.Module) -> nn.Module:
    """Return the model within peft's models, whose own forwards pass all on; any other itself."""
    held = getattr(model, "get_base_model", None)
    while callable(held) and (inner := held()) is not model:
        model, held = inner, getattr(inner, "get_base_model", None)
    return model


def outline_of(model: nn.Module) -> nn.Module:
    """Return modules of the same classes and names as a plain model's, without its adapters.

    Plain attributes and `config` are kept; parameters are zeros that take no memory.
    """
    return _outlined(base_of(model), {})


def _outlined(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    layer = layer_of(module)
    if layer not in made:
        kind = nn.Module if isinstance(layer, torch.jit.ScriptModule) else type(layer)
        twin = made[layer] = object.__new__(kind)
        nn.Module.__init__(twin)
        kept = {n: v for n, v in vars(layer).items() if _is_plain(v) or n == "config"}
        vars(twin).update(kept)
        twin._parameters.update({n: _form(p) for n, p in layer._parameters.items()})
        for name, child in layer._modules.items():
            twin._modules[name] = None if child is None else _outlined(child, made)
    return made[layer]


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _form(parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or is_lazy(parameter):
        return None
    zero = torch.zeros((), dtype=parameter.dtype, device="cpu")
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=parameter.requires_grad)

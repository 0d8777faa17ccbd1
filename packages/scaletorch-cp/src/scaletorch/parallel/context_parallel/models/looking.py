"""Running a model to see what it computes, and leaving it as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ...pg_manager.building import eagerly, evaluating

# Below this a parameter may hide what it multiplies: a branch that begins as zero, a scale of 1e-6.
_SMALL = 1e-3
_PLAIN = (bool, int, float, complex, str)


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Let a forward of `model` show what it computes, without dropout and without gradients.

    What is compiled runs as it was written, so that every call of it can be seen. Warnings are
    ignored: the model's own forward will say what they say.

    Parameters that are nearly zero have other values meanwhile, so that nothing hides behind them.
    Afterwards mode, parameters, buffers, random generators, and numbers and texts that modules keep
    are what they were.
    """
    first = next(model.parameters(), torch.empty(0))
    devices = [] if first.device.type == "cpu" else [first.device]
    kind = first.device.type if devices else "cuda"
    drawing = torch.random.fork_rng(devices, device_type=kind)
    kept = drawing, torch.no_grad(), _state_kept(model), evaluating(model), without_zeros(model)
    with ExitStack() as stack:
        for each in (*kept, eagerly(), warnings.catch_warnings(action="ignore")):
            stack.enter_context(each)
        yield


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Let parameters that are nearly zero have other values, so that nothing hides behind them.

    A parameter of one shape gets the same ones on every rank.
    """
    with torch.no_grad():
        before = [(each, each.clone(), values) for each, values in _other_values(model)]
        for parameter, _, values in before:
            parameter.copy_(values)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, own, _ in before:
                parameter.copy_(own)


def apart(a: Tensor, b: Tensor) -> bool:
    """Return whether two results of one shape differ by more than rounding can."""
    if a.shape != b.shape:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b, bound = a.to(wide), b.to(wide), torch.finfo(a.dtype).eps ** 0.5
    different = ~((a == b) | (a.isnan() & b.isnan()))
    if not different.any():
        return False
    largest = a.nan_to_num(0.0, 0.0, 0.0).abs().max()
    close = (a - b)[different].abs() <= bound * largest
    return not bool(close.all())


def _other_values(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield parameters that are nearly zero, each with values that are not."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel() or parameter.is_meta:
            continue
        if parameter.detach().abs().max() < _SMALL:
            numbers = torch.arange(parameter.numel(), device=parameter.device)
            pattern = numbers.double().cos_().mul_(0.5 / max(parameter.shape[-1:] or (1,)) ** 0.5)
            yield parameter, pattern.to(parameter.dtype).view_as(parameter)


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Put back all buffers and what they held, and numbers and texts that modules keep."""
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    plain = [
        (m, {n: v for n, v in vars(m).items() if isinstance(v, _PLAIN) and n != "training"})
        for m, _ in registered
    ]
    held = {
        each: each.clone() for _, own in registered for each in own.values() if each is not None
    }
    try:
        yield
    finally:
        for module, told in plain:
            vars(module).update(told)
        for module, own in registered:
            module._buffers.clear()
            module._buffers.update(own)
        for each, value in held.items():
            if not (each.is_meta or torch.equal(each, value)):
                each.copy_(value)

"""Run for a while without dropout, without autocast, or with buffers of another dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...dist.building import tensors_in
from ...parallel.data_parallel.building import NARROW

_DROPPING = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_OWNERS: tuple[Any, ...] = (torch._VF, torch)


class _AttendWithoutDropout(TorchFunctionMode):
    """A mode that turns dropout of attention off, except in a backward that recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if len(args) < 5 else {}
        return func(*args, **kwargs)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Turn dropout off for a while, in modules, functions and attention.

    This replaces the kernels that `torch.nn.functional` calls: code may have imported its functions
    by name, and torch's function modes are off while a backward recomputes.
    """
    places = [
        (place, each) for name in _DROPPING for each in (name, f"{name}_") for place in _OWNERS
    ]
    own = [(place, name, getattr(place, name)) for place, name in places if hasattr(place, name)]
    for place, name, _ in own:
        setattr(place, name, lambda x, *_args, **_kwargs: x)
    try:
        with _AttendWithoutDropout():
            yield
    finally:
        for place, name, function in own:
            setattr(place, name, function)


@contextmanager
def buffers_in(
    unit: nn.Module, dtype: torch.dtype | None, of: Collection[torch.dtype] = ()
) -> Iterator[None]:
    """Convert a unit's floating buffers, or those of the dtypes in `of`, to `dtype` for a while."""
    before = [
        (module, name, buffer)
        for module in unit.modules()
        for name, buffer in module._buffers.items()
        if dtype is not None and buffer is not None and buffer.is_floating_point()
        if not of or buffer.dtype in of
    ]
    for module, name, buffer in before:
        module._buffers[name] = buffer.to(dtype)
    try:
        yield
    finally:
        for module, name, buffer in before:
            module._buffers[name] = buffer


def is_narrow(x: Any) -> bool:
    """Return whether this is a 16-bit tensor."""
    return isinstance(x, Tensor) and x.dtype in NARROW


def without_autocast(args: Any) -> Any:
    """Return a context without autocast, on the device of a call's arguments."""
    device = next((x.device.type for x in tensors_in(args)), "cpu")
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()

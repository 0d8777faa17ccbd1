"""What torch keeps for each thread, carried to another one."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from ....dist.building import enter_device

Work = Callable[[], object]


def carried(work: Work, within: AbstractContextManager[object]) -> Work:
    """Return the work as a fresh thread is to run it, once: as it would run here and now.

    That is with this thread's context variables, gradient mode, autocast, modes, hooks on saved
    tensors, device and stream. A profiler of this thread alone does not see it.

    Args:
        work: The work.
        within: What it runs in there.
    """
    context = contextvars.copy_context()
    steps = [_gradients(), _autocast(), _modes(), _saved_tensors(), _device()]

    def run() -> None:
        for step in steps:
            step()
        with within:
            context.run(work)

    return run


def _gradients() -> Work:
    enabled = torch.is_grad_enabled()
    return lambda: torch._C._set_grad_enabled(enabled)


def _autocast() -> Work:
    kinds = {"cpu", _accelerator()}
    states = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in kinds
        if kind is not None and torch.amp.is_autocast_available(kind)
    ]
    caches = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    inside = torch.autocast_decrement_nesting() > 0

    def step() -> None:
        for kind, enabled, dtype in states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        if inside:  # all threads share the cache: the end of a region here must not clear it
            torch.autocast_increment_nesting()

    return step


def _modes() -> Work:
    functions, dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()

    def step() -> None:
        for mode in functions:
            push_function_mode(mode)
        for mode in dispatches:
            push_dispatch_mode(mode)

    return step


def _saved_tensors() -> Work:
    # Only those that were put on last are ever called.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return lambda: None
    return lambda: torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _device() -> Work:
    kind = _accelerator()
    if kind is None:
        return lambda: None
    index, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()

    def step() -> None:
        enter_device(torch.device(kind, index))
        torch.accelerator.set_stream(stream)

    return step


def _accelerator() -> str | None:
    """Return the kind of accelerator whose state is per thread, if this process uses one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not torch.get_device_module(found).is_initialized():
        return None
    return found.type

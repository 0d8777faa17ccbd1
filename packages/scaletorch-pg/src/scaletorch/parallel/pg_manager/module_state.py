"""State that forwards leave behind, and its restoration: generators, buffers, attributes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module())) | {"_is_hf_initialized"}


class Attributes:
    """Attributes of modules, as they are now.

    Args:
        modules: Whose they are.
        every: All attributes, torch's own among them; else only numbers, texts and tuples of them
            that a module's code keeps.
    """

    def __init__(self, modules: Iterable[nn.Module], *, every: bool = False) -> None:
        self._every = every
        self._held = [(module, self._of(module)) for module in modules]

    def changed(self) -> bool:
        """Return whether any has another value now, is new, or is gone."""
        return any(self._of(module) != held for module, held in self._held)

    def put_back(self) -> None:
        """Let them be as they were; those made since go."""
        for module, held in self._held:
            for name in self._of(module).keys() - held.keys():
                del vars(module)[name]
            vars(module).update(held)

    def _of(self, module: nn.Module) -> dict[str, Any]:
        found = vars(module).items()
        return {n: x for n, x in found if self._every or (n not in _OF_TORCH and _is_plain(x))}


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


class ModuleState:
    """Buffers and attributes of modules, as they are now; see `Attributes`."""

    def __init__(self, modules: Iterable[nn.Module], *, every: bool = False) -> None:
        modules = [*modules]
        self._attributes = Attributes(modules, every=every)
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def put_back(self) -> None:
        """Let all be as it was."""
        self._attributes.put_back()
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                if not torch.equal(buffer, values):  # what backward needs may be untouched
                    buffer.copy_(values)
                module._buffers[name] = buffer


@contextmanager
def restored(model: nn.Module, *, every: bool = False) -> Iterator[None]:
    """Put back, in the end, random generators, buffers and attributes; see `Attributes`."""
    before, state = ModuleState(model.modules(), every=every), random.getstate()
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    try:
        with ExitStack() as forked:
            forked.enter_context(torch.random.fork_rng([]))
            for device in devices:
                forked.enter_context(torch.random.fork_rng([device], device_type=device.type))
            yield
    finally:
        random.setstate(state)
        before.put_back()

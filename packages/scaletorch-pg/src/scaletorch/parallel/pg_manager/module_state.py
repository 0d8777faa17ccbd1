"""Save and restore the state that a forward changes: random generators, buffers, attributes."""

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
    """A snapshot of the attributes of modules.

    Args:
        modules: The modules.
        every: Save all attributes, including torch's own; else only numbers, strings, None and
            tuples of these that the module's own code sets.
    """

    def __init__(self, modules: Iterable[nn.Module], *, every: bool = False) -> None:
        self._every = every
        self._held = [(module, self._of(module)) for module in modules]

    def changed(self) -> bool:
        """Return whether any attribute was changed, added or deleted since."""
        return any(self._of(module) != held for module, held in self._held)

    def put_back(self) -> None:
        """Restore all attributes and delete those added since."""
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
    """A snapshot of the buffers and attributes of modules; see `Attributes`."""

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
        """Restore all buffers and attributes."""
        self._attributes.put_back()
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                if not torch.equal(buffer, values):  # a write would break a later backward
                    buffer.copy_(values)
                module._buffers[name] = buffer


@contextmanager
def restored(model: nn.Module, *, every: bool = False) -> Iterator[None]:
    """Restore random generators, buffers and attributes after the block; see `Attributes`."""
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

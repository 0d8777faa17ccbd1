"""A forward that is run for what it asks for alone: what it writes is taken back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....dist.building import map_tensors
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

_CONTAINERS = list, dict, set, deque  # and classes derived from them


class Draws(NamedTuple):
    """States of the generators that a forward may draw from."""

    device: torch.device
    host: Tensor
    other: Tensor | None
    python: tuple[Any, ...]

    @classmethod
    def now(cls, device: torch.device) -> Draws:
        """Return the states of torch's, of the host and of a device, and of Python's."""
        other = None if device.type == "cpu" else _module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), other, random.getstate())

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.host)
        random.setstate(self.python)
        if self.other is not None:
            _module(self.device).set_rng_state(self.other, self.device)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def run_on_copies(
    forward: Callable[..., Any], args: Any, kwargs: Any, modules: Sequence[nn.Module]
) -> None:
    """Call a forward on copies of all that it may write to, and drop its result.

    These are the tensors that it is given, and of modules their buffers and other attributes:
    tensors, and lists, dicts and sets at any depth. What it writes elsewhere stays.

    Args:
        forward: A module's.
        args: As it is called.
        kwargs: The same.
        modules: It, and those that it calls.

    Raises:
        InvalidArgumentError: It has written to a parameter.
    """
    parameters = {p for each in modules for p in each.parameters(recurse=False)}
    versions = [(p, p._version) for p in parameters if not p.is_inference()]
    with _on_copies(modules):
        forward(*map_tensors(torch.clone, args), **map_tensors(torch.clone, kwargs))
    if any(p._version != version for p, version in versions):
        raise InvalidArgumentError(
            f"{describe_rank()}: a block that loops over a list of experts writes to a parameter "
            "in its forward, and would do so twice, as it is run twice: keep it in a buffer, or "
            "write to it outside of the forward"
        )


@contextmanager
def _on_copies(modules: Sequence[nn.Module]) -> Iterator[None]:
    kept = [(vars(module), dict(vars(module))) for module in modules]
    for live, before in kept:
        live.update({name: _copy(value) for name, value in before.items()})
    try:
        yield
    finally:
        for live, before in kept:
            live.clear()
            live.update(before)


def _copy(value: Any) -> Any:
    """Return a copy of a tensor or container, at any depth; all else is the same."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.clone()
    if not isinstance(value, _CONTAINERS):
        return value
    copied: Any = value.copy()
    if not isinstance(copied, set):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            copied[key] = _copy(each)
    return copied

"""Where a guard, if there is one, is told of every call and of every wait."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup


class Guard(Protocol):
    """What `scaletorch.dist.guard` puts in here while it is on."""

    def record(self, group: ProcessGroup, call: str, facts: Sequence[Any]) -> object:
        """Note a collective that this thread is about to make."""

    def record_message(
        self, group: ProcessGroup, data: Tensor, peer: int, tag: int, sends: bool
    ) -> object:
        """Note one end of a message; return what tells it apart."""

    def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make the backend's call for the last thing noted; wrap the handle that it returns."""

    def run_noted(
        self, notes: Sequence[object], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for these notes, and wrap the handle, or handles, of it."""


guard: Guard | None = None


def told(name: str) -> Callable[..., Any]:
    """Return a call of torch.distributed that may block, so that a guard can free it.

    It is looked up whenever it is made: vendors' plugins, and tests, put their own in its place.
    """

    @functools.wraps(getattr(c10d, name))
    def run(*args: Any, **options: Any) -> Any:
        call = getattr(c10d, name)
        return call(*args, **options) if guard is None else guard.run(call, *args, **options)

    return run

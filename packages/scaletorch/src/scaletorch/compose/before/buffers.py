"""Buffers that a forward changes: refused if ranks then differ, or if each run changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...dist import all_gather_object
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import ProcessGroupManager
from ..digests import written

_WAY_OUT = (
    "In one process it would follow the whole batch. Keep such a buffer out of the forward, update "
    "it after the step from what all ranks have, or leave the module in eval mode"
)


class _Changes:
    """Which buffers were changed, and how they looked after each forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = {name: (b, _version(b)) for name, b in model.named_buffers()}
        self.after_each: list[dict[str, str]] = []

    def now(self) -> dict[str, str]:
        """Return a digest of every buffer that is another, or was written to, since the start."""
        return {
            name: written(buffer)
            for name, buffer in self.model.named_buffers()
            if not self._untouched(name, buffer)
        }

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and note how buffers look after it."""
        output = forward(*args, **kwargs)
        self.after_each.append(self.now())
        return output

    def by_count(self) -> list[str]:
        """Return the buffers that changed again after the first forward that changed them."""
        last = self.now()
        first: dict[str, str] = {}
        for looks in self.after_each:
            first = looks | first
        return [name for name, look in last.items() if first.get(name, look) != look]

    def _untouched(self, name: str, buffer: Tensor) -> bool:
        old, version = self.before.get(name, (None, 0))
        return old is buffer and version == _version(buffer)


@contextmanager
def buffers_followed(
    model: nn.Module, num_micro_batches: int, manager: ProcessGroupManager
) -> Iterator[None]:
    """Find out in a step whether forwards change buffers otherwise than one process's would.

    Costs a look at each buffer's version, and one exchange of the digests of those that have
    changed.

    Raises:
        InvalidArgumentError: Ranks that should hold the same buffer hold others, or it depends on
            the number of micro-batches; on every rank, at the end of the step.
    """
    changes = _Changes(model)
    # Not a hook, which would be the plain model's own.
    model.forward = partial(changes.around, model.forward)
    try:
        yield
    finally:
        del model.forward
    everyone = all_gather_object(changes.now(), manager.cp_dp_group)
    unlike = [name for name in everyone[0] if len({each.get(name) for each in everyone}) > 1]
    error = None
    if unlike:
        error = InvalidArgumentError(
            f"the forward changes buffer {unlike[0]} by what it sees, and ranks of other rows or "
            f"positions now hold other values of it. {_WAY_OUT}"
        )
    elif again := changes.by_count():
        runs = f"{num_micro_batches} micro-batches"
        runs = runs if num_micro_batches > 1 else "a forward that is run again in backward"
        error = InvalidArgumentError(
            f"the forward changes buffer {again[0]} each time that it runs, and {runs} run it "
            f"several times for one batch. {_WAY_OUT}"
        )
    agree("the buffers that the first step has changed", [], manager.world_group, error=error)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

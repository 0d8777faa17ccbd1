"""Buffers that a forward changes: refused if ranks then differ, or if each run changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ...dist import all_gather_object
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.pg_manager.building import divided_modules
from ...parallel.tensor_parallel import TensorParallelLayer
from ..digests import written

_WAY_OUT = (
    "In one process it would follow the whole batch. Keep such a buffer out of the forward, update "
    "it after the step from what all ranks have, or leave the module in eval mode"
)


# Which ranks have to hold the same values, by the axes that they differ in.
_ALIKE = {
    "other rows or positions": ("dp", "cp"),
    "other shards of features or tokens": ("tp",),
    "other stages, which share it,": ("pp",),
}
_Looks = dict[str, str]  # buffers that have changed -> their digests


class _Changes:
    """Which buffers were changed, and how they looked after each forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = self._all()
        self.after_each: list[_Looks] = []

    def now(self) -> _Looks:
        """Return a digest of every buffer that holds other values than at the start."""
        return {n: look for n, look in self._all().items() if self.before.get(n) != look}

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and note how buffers look after it."""
        output = forward(*args, **kwargs)
        self.after_each.append(self.now())
        return output

    def by_count(self) -> list[str]:
        """Return the buffers that changed again after the first forward that changed them."""
        last = self.now()
        first: _Looks = {}
        for looks in self.after_each:
            first = looks | first
        return [name for name, look in last.items() if first.get(name, look) != look]

    def _all(self) -> _Looks:
        """Return the digest of every buffer: versions would not show what is written to `.data`."""
        return {name: written(buffer) for name, buffer in self.model.named_buffers()}


@contextmanager
def buffers_followed(
    model: nn.Module, num_micro_batches: int, manager: ProcessGroupManager
) -> Iterator[None]:
    """Find out in a step whether forwards change buffers otherwise than one process's would.

    Costs a look at each buffer, before and after each forward, and one exchange of the digests of
    those that have changed.

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
    changed, shards = changes.now(), _of_shards(model)
    everyone = all_gather_object(
        (changed, [n for n in changed if n in shards]), manager.world_group
    )
    error = _unlike(everyone, manager)
    if error is None and (again := changes.by_count()):
        runs = f"{num_micro_batches} micro-batches"
        runs = runs if num_micro_batches > 1 else "a forward that is run again in backward"
        error = InvalidArgumentError(
            f"the forward changes buffer {again[0]} each time that it runs, and {runs} run it "
            f"several times for one batch. {_WAY_OUT}"
        )
    agree("the buffers that the first step has changed", [], manager.world_group, error=error)


def _unlike(
    everyone: Sequence[tuple[_Looks, Sequence[str]]], manager: ProcessGroupManager
) -> InvalidArgumentError | None:
    """Return the error of the first buffer of which ranks hold other values, if there is one."""
    for whose, axes in _ALIKE.items():
        held: dict[Any, set[str | None]] = {}
        for name in {name: None for looks, _ in everyone for name in looks}:
            for rank, (looks, shards) in enumerate(everyone):
                if (axes == ("tp",) and name in shards) or (axes == ("pp",) and name not in looks):
                    continue
                place = manager.grid.coordinates(rank)._replace(**dict.fromkeys(axes, 0))
                held.setdefault((name, place), set()).add(looks.get(name))
        for (name, _), looks_of_it in held.items():
            if len(looks_of_it) > 1:
                return InvalidArgumentError(
                    f"the forward changes buffer {name} by what it sees, and ranks of {whose} now "
                    f"hold other values of it. {_WAY_OUT}"
                )
    return None


def _of_shards(model: nn.Module) -> set[str]:
    """Return the buffers of modules that each tp rank has a shard of."""
    divided = {*divided_modules(model)}
    return {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, TensorParallelLayer) or module in divided
        for own in module._buffers
    }

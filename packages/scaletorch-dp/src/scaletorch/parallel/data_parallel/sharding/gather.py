"""Fetching updated parameters behind the next forward, each before it is read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from ....dist import Work
from .bucket import ShardedBucket

# Their elements are called themselves, and wait for themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Gathers:
    """The parameters under way, and who waits for them: a module's forward for those it may read.

    That is its own parameters and those of all modules below it, but for the elements of lists,
    whose own forwards wait. The root's forward waits for those that no other was seen to wait for.

    Args:
        module: The model.
        buckets: Whose parameters are fetched, in the order of backward.
    """

    def __init__(self, module: nn.Module, buckets: Iterable[ShardedBucket]) -> None:
        self._under_way: dict[ShardedBucket, Work[Any]] = {}
        self._order = list(buckets)
        self.buckets = frozenset(self._order)
        bucket_of = {s.parameter: bucket for bucket in self._order for s in bucket.slots}
        self._read_by = {
            name: {bucket_of[each] for each in _readable(below) if each in bucket_of}
            for name, below in module.named_modules()
        }
        self._seen: set[str] = set()
        hooks = []
        for name, below in module.named_modules():
            hooks.append(below.register_forward_pre_hook(Waiter(self, name)))
            hooks.append(below.register_state_dict_pre_hook(Waiter(self)))
            hooks.append(below.register_load_state_dict_pre_hook(Waiter(self)))
        weakref.finalize(self, _remove, hooks).atexit = False

    def start(self) -> None:
        """Start fetching all, in the order in which forward reads them."""
        for bucket in reversed(self._order):
            self._under_way[bucket] = bucket.gather()
        waited = set().union(*(self._read_by[name] for name in self._seen if name))
        self._read_by[""] |= self.buckets - waited

    def before_forward(self, name: str) -> None:
        """Wait for the parameters that the forward of a module may read."""
        self._seen.add(name)
        if self._under_way:
            for bucket in self._read_by[name] & self._under_way.keys():
                self._under_way.pop(bucket).wait()

    def wait(self) -> None:
        """Wait for all."""
        while self._under_way:
            _, work = self._under_way.popitem()
            work.wait()


def _readable(module: nn.Module) -> Iterable[nn.Parameter]:
    yield from module.parameters(recurse=False)
    if not isinstance(module, _LISTS):
        for child in module.children():
            yield from _readable(child)


class Waiter:
    """A hook that waits for the parameters of a module's forward, or all; a copy of it does not.

    Args:
        gathers: For which; they are not kept alive.
        name: The module's; None waits for all.
    """

    def __init__(self, gathers: Gathers | None = None, name: str | None = None) -> None:
        self._gathers = None if gathers is None else weakref.ref(gathers)
        self._name = name

    def __call__(self, *_: Any) -> None:
        """Wait."""
        gathers = None if self._gathers is None else self._gathers()
        if gathers is None:
            return
        if self._name is None:
            gathers.wait()
        else:
            gathers.before_forward(self._name)

    def __reduce__(self) -> tuple[type[Waiter], tuple[()]]:
        return Waiter, ()  # a copy's parameters are its own


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()

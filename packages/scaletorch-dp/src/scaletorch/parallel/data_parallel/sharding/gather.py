"""The gather of updated parameters during the next forward, each before it is read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from ....dist import Work
from ..buckets.hooks import remove_hooks
from .sharded_bucket import ShardedBucket

# Containers whose elements are called, and wait, by themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ParameterGather:
    """The parameters in flight, and the forwards that wait for them.

    The forward of a module waits for its own parameters and those of all modules below it, except
    the elements of containers, which wait in their own forwards. The root's forward waits for
    parameters that no other forward waited for.

    Args:
        module: The model.
        buckets: The buckets of its parameters, in the order of backward.
    """

    def __init__(self, module: nn.Module, buckets: Iterable[ShardedBucket]) -> None:
        self._in_flight: dict[ShardedBucket, Work[Any]] = {}
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
            hooks.append(below.register_forward_pre_hook(WaitHook(self, name)))
            hooks.append(below.register_state_dict_pre_hook(WaitHook(self)))
            hooks.append(below.register_load_state_dict_pre_hook(WaitHook(self)))
        weakref.finalize(self, remove_hooks, hooks).atexit = False

    def start(self) -> None:
        """Start gathering all parameters, in the order in which forward reads them."""
        for bucket in reversed(self._order):
            self._in_flight[bucket] = bucket.gather()
        waited = set().union(*(self._read_by[name] for name in self._seen if name))
        self._read_by[""] |= self.buckets - waited

    def before_forward(self, name: str) -> None:
        """Wait for the parameters that the forward of a module may read."""
        self._seen.add(name)
        if self._in_flight:
            for bucket in self._read_by[name] & self._in_flight.keys():
                self._in_flight.pop(bucket).wait()

    def settle(self) -> None:
        """Copy all changes of gradients since backward to the shards."""
        for bucket in self.buckets:
            bucket.settle()

    def wait(self) -> None:
        """Wait for all parameters."""
        while self._in_flight:
            _, work = self._in_flight.popitem()
            work.wait()


def _readable(module: nn.Module) -> Iterable[nn.Parameter]:
    yield from module.parameters(recurse=False)
    if not isinstance(module, _LISTS):
        for child in module.children():
            yield from _readable(child)


class WaitHook:
    """A hook that waits for the parameters of a module's forward, or for all if `name` is None.

    A copy of it does not wait. It does not keep the gather alive.
    """

    def __init__(self, gather: ParameterGather | None = None, name: str | None = None) -> None:
        self._gather = None if gather is None else weakref.ref(gather)
        self._name = name

    def __call__(self, *_: Any) -> None:
        """Wait."""
        gather = None if self._gather is None else self._gather()
        if gather is None:
            return
        if self._name is None:
            gather.wait()
        else:
            gather.before_forward(self._name)

    def __reduce__(self) -> tuple[type[WaitHook], tuple[()]]:
        return WaitHook, ()  # a copy has its own parameters

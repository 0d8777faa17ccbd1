"""Fetching updated parameters behind the next forward, each before it is read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from ....dist import Work
from .bucket import ShardedBucket

# Their elements are called themselves, and wait for themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Gathers:
    """The parameters under way, and who waits for them: a module's forward for what it may read.

    That is its own parameters and those of all modules below it, but for the elements of lists,
    whose own forwards wait. What no forward was seen to wait for is waited for by the root's.

    Args:
        module: The model.
        buckets: Whose parameters are fetched, in the order of backward.
    """

    def __init__(self, module: nn.Module, buckets: Iterable[ShardedBucket]) -> None:
        self._under_way: dict[ShardedBucket, Work[None]] = {}
        self._buckets = list(buckets)
        bucket_of = {s.parameter: bucket for bucket in self._buckets for s in bucket.slots}
        self._read_by = {
            name: {bucket_of[each] for each in _readable(below) if each in bucket_of}
            for name, below in module.named_modules()
        }
        self._seen: set[str] = set()
        hooks = []
        for name, below in module.named_modules():
            wait = partial(_before_forward, weakref.ref(self), name)
            hooks.append(below.register_forward_pre_hook(wait))
            everything = partial(_before_state, weakref.ref(self))
            hooks.append(below.register_state_dict_pre_hook(everything))
        weakref.finalize(self, _remove, hooks).atexit = False

    def start(self) -> None:
        """Start fetching all, what forward reads first at first; for the root's forward at once."""
        for bucket in reversed(self._buckets):
            self._under_way[bucket] = bucket.gather()
        waited = set().union(*(self._read_by[name] for name in self._seen if name))
        self._read_by[""] |= set(self._buckets) - waited

    def before_forward(self, name: str) -> None:
        """Wait for what the forward of a module may read."""
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


def _before_forward(this: weakref.ref[Gathers], name: str, *_: Any) -> None:
    gathers = this()
    if gathers is not None:
        gathers.before_forward(name)


def _before_state(this: weakref.ref[Gathers], *_: Any) -> None:
    gathers = this()
    if gathers is not None:
        gathers.wait()


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()

"""The gather of updated parameters, and the hooks of a sharded optimizer that start it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ....dist import Work
from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ..buckets.hooks import remove_hooks
from .shards import ShardedBucket, zero

# Containers whose elements are called, and wait, by themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ParameterGather:
    """The parameters in flight, and the forwards that wait for them.

    The forward of a module waits for its own parameters and those of all modules below it, except
    the elements of containers, which wait in their own forwards. The root's forward waits for
    parameters that no other forward waited for. `buckets` come in the order of backward.
    """

    def __init__(self, module: nn.Module, buckets: Iterable[ShardedBucket]) -> None:
        self._in_flight: dict[ShardedBucket, Work[Any]] = {}
        self._order = list(buckets)
        self.buckets = frozenset(self._order)
        bucket_of = {s.parameter: bucket for bucket in self._order for s in bucket.slots}
        self._read_by = {
            name: {bucket_of[p] for p in _readable(below) if p in bucket_of}
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
    """A hook that waits for the parameters of a module's forward, or for all without a name."""

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


_gathers: weakref.WeakKeyDictionary[Optimizer, ParameterGather] = weakref.WeakKeyDictionary()


def hook_optimizer(
    optimizer: Optimizer, gather: ParameterGather, model: weakref.ref[Any], *, overlap: bool
) -> None:
    """Hook an optimizer of shards: steps follow gradients and gather parameters.

    `zero_grad` reaches the model's gradients. `train` and `eval`, with which schedule-free
    optimizers change weights, gather them too. `model` is the wrapper of the parameters.
    """

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": partial(_prepare, gather, model, closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(_prepare, gather, model, args[1]), *args[2:]), kwargs
        return _prepare(gather, model)

    def after(*_: Any) -> None:
        gather.start()
        if not overlap:
            gather.wait()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_post_hook(partial(_add_shard_names, gather))
    optimizer.register_load_state_dict_pre_hook(partial(_require_own_shards, gather))
    zero_grad = partial(_zero_grad, weakref.ref(optimizer), gather)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    for name in ("train", "eval"):
        if callable(getattr(type(optimizer), name, None)):
            call = partial(_call_and_gather, weakref.ref(optimizer), gather, name)
            setattr(optimizer, name, call)
    _gathers[optimizer] = gather


def _prepare(
    gather: ParameterGather, model: weakref.ref[Any], closure: Callable[[], Any] | None = None
) -> Any:
    """Call a step's closure, and let the shards follow all changes; return the closure's result."""
    loss = None if closure is None else closure()
    this = model()
    if this is not None:
        this.wrapped.refuse_others(this.module)
        this.wait_for_parameters()
    for bucket in gather.buckets:
        bucket.before_step()
    return loss


def settle(optimizer: Optimizer) -> None:
    """Copy all changes of gradients since backward to an optimizer's shards, if it has any."""
    gather = _gathers.get(optimizer)
    if gather is not None:
        gather.settle()


def _zero_grad(
    optimizer: weakref.ref[Optimizer], gather: ParameterGather, set_to_none: bool = True
) -> None:
    """Forget the gradients of an optimizer's parameters, in shards and in flight."""
    this = optimizer()
    if this is not None:
        type(this).zero_grad(this, set_to_none)
    for bucket in gather.buckets:
        for parameter in (slot.parameter for slot in bucket.slots):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                zero(parameter.grad)


def _call_and_gather(
    optimizer: weakref.ref[Optimizer], gather: ParameterGather, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Call a method that changes this rank's shards, and gather the others."""
    gather.wait()
    this = optimizer()
    result = None if this is None else getattr(type(this), name)(this, *args, **kwargs)
    gather.start()
    gather.wait()
    return result


def _shard_names(gather: ParameterGather) -> list[str]:
    names = [f"{s.name}[{s.start}:{s.stop}]" for bucket in gather.buckets for s in bucket.shards]
    return sorted(names)


def _add_shard_names(
    gather: ParameterGather, _: Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    return {**state, "shards": _shard_names(gather)}


def _require_own_shards(gather: ParameterGather, _: Optimizer, state: dict[str, Any]) -> None:
    if state.get("shards") != _shard_names(gather):
        raise StateError(
            f"{describe_rank()}: this state comes from another rank or layout: state_dict() of a "
            "sharded optimizer has the shards of one rank; use scaletorch.checkpoint instead"
        )

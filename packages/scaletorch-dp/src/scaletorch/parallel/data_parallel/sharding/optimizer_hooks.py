"""Hooks of a sharded optimizer's calls, which follow gradients and gather parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ....dist.errors import StateError
from ...pg_manager import describe_rank
from .gather import ParameterGather
from .gradient import zero

_gathers: weakref.WeakKeyDictionary[Optimizer, ParameterGather] = weakref.WeakKeyDictionary()


def hook_optimizer(
    optimizer: Optimizer, gather: ParameterGather, before_step: Callable[[], None], *, overlap: bool
) -> None:
    """Hook an optimizer of shards: steps follow gradients and gather parameters.

    `zero_grad` reaches the model's gradients. `train` and `eval`, with which schedule-free
    optimizers change weights, gather them too. `before_step` is called before an update, and before
    the buckets read their gradients.
    """

    def ready() -> None:
        before_step()
        for bucket in gather.buckets:
            bucket.before_step()

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            ready()
            return None
        return _prepare_closure(args, kwargs, closure, ready)

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
            setattr(
                optimizer, name, partial(_call_and_gather, weakref.ref(optimizer), gather, name)
            )
    _gathers[optimizer] = gather


def settle(optimizer: Optimizer) -> None:
    """Copy all changes of gradients since backward to an optimizer's shards, if it has any."""
    gather = _gathers.get(optimizer)
    if gather is not None:
        gather.settle()


def _prepare_closure(
    args: Any, kwargs: Any, closure: Callable[[], Any], ready: Callable[[], None]
) -> tuple[Any, Any]:
    """Return the arguments of a step with a closure that ends with `ready`."""

    def closure_then_ready() -> Any:
        loss = closure()
        ready()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_ready}
    return (args[0], closure_then_ready, *args[2:]), kwargs


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
            f"{describe_rank()}: this state is not of this rank's shards: state_dict() of a "
            "sharded optimizer is one rank's share on one layout; use scaletorch.checkpoint instead"
        )

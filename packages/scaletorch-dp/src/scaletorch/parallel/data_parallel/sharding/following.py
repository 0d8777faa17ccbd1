"""A sharded optimizer's own calls, which follow the model's gradients and fetch its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ....dist.errors import StateError
from ...pg_manager import describe_rank
from .gather import Gathers
from .gradient import zero

_settling: weakref.WeakKeyDictionary[Optimizer, Gathers] = weakref.WeakKeyDictionary()


def follow(
    optimizer: Optimizer, gathers: Gathers, before_step: Callable[[], None], *, overlap: bool
) -> None:
    """Let the optimizer's steps read and fetch parameters, and its zero_grad reach the model's.

    If it has `train` and `eval`, as schedule-free ones, which change weights, these fetch them too.

    Args:
        optimizer: Its parameters are the shards of the buckets.
        gathers: Fetches parameters, and knows the buckets.
        before_step: Called before an update, and before the buckets look at their gradients.
        overlap: Whether parameters are fetched behind the next forward.
    """

    def ready() -> None:
        before_step()
        for bucket in gathers.buckets:
            bucket.before_step()

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            ready()
            return None
        return _replace_closure(args, kwargs, _followed(closure, ready))

    def after(*_: Any) -> None:
        gathers.start()
        if not overlap:
            gathers.wait()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_post_hook(partial(_name_shards, gathers))
    optimizer.register_load_state_dict_pre_hook(partial(_refuse_others, gathers))
    zero_grad = partial(_zero_grad, weakref.ref(optimizer), gathers)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    for name in ("train", "eval"):
        if callable(getattr(type(optimizer), name, None)):
            setattr(optimizer, name, partial(_change, weakref.ref(optimizer), gathers, name))
    _settling[optimizer] = gathers


def settle(optimizer: Optimizer) -> None:
    """Let an optimizer's shards, if it has some, follow all changes of gradients since backward.

    Raises:
        StateError: A gradient has not been synchronised.
    """
    gathers = _settling.get(optimizer)
    if gathers is not None:
        for bucket in gathers.buckets:
            bucket.settle()


def _followed(closure: Callable[[], Any], ready: Callable[[], None]) -> Callable[[], Any]:
    def followed() -> Any:
        loss = closure()
        ready()
        return loss

    return followed


def _replace_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _zero_grad(
    optimizer: weakref.ref[Optimizer], gathers: Gathers, set_to_none: bool = True
) -> None:
    """Forget the gradients of an optimizer's parameters, in shards and on their way there."""
    this = optimizer()
    if this is not None:
        type(this).zero_grad(this, set_to_none)
    for bucket in gathers.buckets:
        for parameter in (slot.parameter for slot in bucket.slots):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                zero(parameter.grad)


def _change(
    optimizer: weakref.ref[Optimizer], gathers: Gathers, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Call a method that changes this rank's shards, and fetch the others'."""
    gathers.wait()
    this = optimizer()
    result = None if this is None else getattr(type(this), name)(this, *args, **kwargs)
    gathers.start()
    gathers.wait()
    return result


def _shard_names(gathers: Gathers) -> list[str]:
    names = [f"{s.name}[{s.start}:{s.stop}]" for bucket in gathers.buckets for s in bucket.shards]
    return sorted(names)


def _name_shards(gathers: Gathers, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "shards": _shard_names(gathers)}


def _refuse_others(gathers: Gathers, _: Optimizer, state: dict[str, Any]) -> None:
    if state.get("shards") != _shard_names(gathers):
        raise StateError(
            f"{describe_rank()}: this state is not of this rank's shards: state_dict() of a "
            "sharded optimizer is one rank's part on one layout; use scaletorch.checkpoint instead"
        )

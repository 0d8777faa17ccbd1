"""Run code before and after each call of a module, around its hooks and its own `__call__`.

The module gets a subclass of its class. Copies and pickles of it have its own class again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, update_wrapper
from typing import Any, Protocol

import torch
from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank

_CALLS, _OWN_FORWARD = "_pipeline_calls", "_own_forward"
_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


class Surrounding(Protocol):
    """Code that runs before and after the calls of a module."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call."""

    def after(self, module: nn.Module, output: Any) -> Any:
        """Return what the caller gets for the output of a call."""

    def takes_forward(self) -> bool:
        """Return whether a call of the module's `forward`, outside its `__call__`, is one."""


class _Calls:
    """The calls of one module.

    Attributes:
        around: What surrounds them, the innermost first.
        running: How many of them are running.
    """

    def __init__(self) -> None:
        self.around: tuple[Surrounding, ...] = ()
        self.running = 0


def surround(module: nn.Module, surrounding: Surrounding, *, innermost: bool = False) -> None:
    """Surround the calls of a module by one thing more.

    Args:
        module: The module.
        surrounding: What runs before and after its calls.
        innermost: Within all that surrounds them already, rather than around it.

    Raises:
        InvalidArgumentError: Its class cannot have subclasses.
    """
    kind: Any = type(module)
    if not is_surrounded(module):
        try:
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError("its calls are the interpreter's")
            module.__class__ = _surrounded(kind)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{describe_rank()}: the calls of a {kind.__name__} cannot be followed, "
                "and a stage passes on what the call of its last layer returns: let the model have "
                "an nn.Module around it"
            ) from error
    calls = vars(module).setdefault(_CALLS, _Calls())
    calls.around = (surrounding, *calls.around) if innermost else (*calls.around, surrounding)


def is_surrounded(module: nn.Module) -> bool:
    """Return whether a module has the class that lets its calls be surrounded."""
    return hasattr(type(module), _OWN_FORWARD)


def release(module: nn.Module, surrounding: Surrounding) -> None:
    """Undo `surround`."""
    calls = vars(module)[_CALLS]
    calls.around = tuple(each for each in calls.around if each is not surrounding)
    if not calls.around and _OWN_FORWARD in vars(type(module)):
        del vars(module)[_CALLS]
        module.__class__ = type(module).__base__  # type: ignore[assignment]


def _call(
    module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    calls = module.__dict__.get(_CALLS)
    if calls is None:  # a copy
        return plain(*args, **kwargs)
    for each in reversed(calls.around):
        args, kwargs = each.before(module, args, kwargs)
    calls.running += 1
    try:
        output = plain(*args, **kwargs)
    finally:
        calls.running -= 1
    for each in calls.around:
        output = each.after(module, output)
    return output


class _Forward:
    """The `forward` of a surrounded module: the model's own code may call it as it is."""

    def __get__(self, module: nn.Module | None, kind: Any) -> Any:
        if module is None:
            return kind._own_forward
        # The compiler reads this.
        plain: Any = module.__dict__.get("forward")
        if plain is None:
            plain = module._own_forward
        calls = module.__dict__.get(_CALLS)
        if torch.compiler.is_compiling() or calls is None or calls.running:
            return plain
        if not any([each.takes_forward() for each in calls.around]):
            return plain

        def whole(*args: Any, **kwargs: Any) -> Any:
            return _call(module, plain, args, kwargs)

        return update_wrapper(whole, plain)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module: nn.Module) -> None:
        if "forward" not in module.__dict__:
            raise AttributeError("forward")
        del module.__dict__["forward"]


@cache
def _surrounded(own: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a class whose calls are surrounded; one for all its modules."""

    class Surrounded(own):  # type: ignore[misc, valid-type]
        _own_forward = inspect.getattr_static(own, "forward")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _call(self, super().__call__, args, kwargs)

        def __getstate__(self) -> Any:
            state = super().__getstate__()
            if isinstance(state, dict):
                return {name: value for name, value in state.items() if name != _CALLS}
            return state

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Protocol 2 insists on the class that the module has.
            made, arguments, *rest = super().__reduce_ex__(min(protocol, 1))
            made = own if made is Surrounded else made
            return made, tuple(own if each is Surrounded else each for each in arguments), *rest

    # A class may wrap the forward of each subclass of it, as layers of transformers do.
    Surrounded.forward = _Forward()
    for name in _NAMES:
        setattr(Surrounded, name, getattr(own, name))
    return Surrounded

"""Wrapped calls of a stage's modules: their arguments are checked, and their outputs are noted.

Code runs before and after each call of a module, outside its hooks and its own `__call__`. For that
the module gets a subclass of its class; copies and pickles of it have the original class again. A
stage's wrapper refuses stand-ins as arguments, and takes the output of the last module.

The first forward of a kind runs uncompiled, with each tensor's origin followed and errors
explained. It finds the arguments of later stages' modules that depend on this stage's own modules.
Later forwards of the same kind send the same arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import DistError
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly
from .passage import Passage, Passages
from .stand_ins import OF_FORM_ALONE, has_stand_ins, kind_of, with_received

_CALLS, _OWN_FORWARD = "_pipeline_calls", "_own_forward"
_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")
_UNKNOWN = (
    "a tensor that the model's forward makes from hidden states, or with a module of another stage "
    "(a skip connection, the embedding's output, a condition embedded once for all layers). This "
    "stage does not have its values: let layers pass it on in one tuple with the hidden states, or "
    "compute it in every layer"
)


class Surrounding(Protocol):
    """Code that runs before and after the calls of a module."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments to call the module with."""

    def after(self, module: nn.Module, output: Any) -> Any:
        """Return the output for the caller."""

    def takes_forward(self) -> bool:
        """Return whether a direct call of the module's `forward` counts as a call."""


class _Calls:
    """The code that surrounds one module's calls, innermost first, and how many calls run now."""

    def __init__(self) -> None:
        self.surroundings: tuple[Surrounding, ...] = ()
        self.running = 0


def surround(module: nn.Module, surrounding: Surrounding, *, innermost: bool = False) -> None:
    """Run code before and after the calls of a module, outside or inside all earlier surroundings.

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
                f"{describe_rank()}: the calls of a {kind.__name__} cannot be intercepted, as its "
                "class allows no subclass, and a stage sends the output of its last layer's call: "
                "put an nn.Module around it"
            ) from error
    calls = vars(module).setdefault(_CALLS, _Calls())
    known = calls.surroundings
    calls.surroundings = (surrounding, *known) if innermost else (*known, surrounding)


def is_surrounded(module: nn.Module) -> bool:
    """Return whether a module has a class that `surround` has made."""
    return hasattr(type(module), _OWN_FORWARD)


def release(module: nn.Module, surrounding: Surrounding) -> None:
    """Undo `surround`, if it has succeeded."""
    calls = vars(module).get(_CALLS, _Calls())
    calls.surroundings = tuple(one for one in calls.surroundings if one is not surrounding)
    if not calls.surroundings and _OWN_FORWARD in vars(type(module)):
        del vars(module)[_CALLS]
        module.__class__ = type(module).__base__  # type: ignore[assignment]


def _call(
    module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    calls = module.__dict__.get(_CALLS)
    if calls is None:  # a copy of the module
        return plain(*args, **kwargs)
    for surrounding in reversed(calls.surroundings):
        args, kwargs = surrounding.before(module, args, kwargs)
    calls.running += 1
    try:
        output = plain(*args, **kwargs)
    finally:
        calls.running -= 1
    for surrounding in calls.surroundings:
        output = surrounding.after(module, output)
    return output


class _Forward:
    """The `forward` of a surrounded module, since the model's code may call it directly."""

    def __get__(self, module: nn.Module | None, kind: Any) -> Any:
        if module is None:
            return kind._own_forward
        # torch.compile traces this code, so it stays simple.
        plain: Any = module.__dict__.get("forward")
        if plain is None:
            plain = module._own_forward
        calls = module.__dict__.get(_CALLS)
        if torch.compiler.is_compiling() or calls is None or calls.running:
            return plain
        if not any([one.takes_forward() for one in calls.surroundings]):
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
    """Return the subclass of a class with surrounded calls, the same one for all its modules."""

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
            # Protocol 2 would require the class that the module has now, so take 1 at most.
            function, arguments, *rest = super().__reduce_ex__(min(protocol, 1))
            function = own if function is Surrounded else function
            return function, tuple(own if a is Surrounded else a for a in arguments), *rest

    # Set after the class is made: some classes wrap the forward of every subclass, as layers of
    # transformers do.
    Surrounded.forward = _Forward()
    for name in _NAMES:
        setattr(Surrounded, name, getattr(own, name))
    return Surrounded


def check_output(output: Any) -> None:
    """Check that the model's output on the last stage holds no stand-in."""
    if has_stand_ins(output):
        raise InvalidArgumentError(f"{describe_rank()}: the model returns {_UNKNOWN}")


class Gates:
    """Wrappers of a stage's modules: they refuse stand-ins, and take the last module's output."""

    def __init__(
        self, passages: Passages, stage: int, lists: dict[str, str], *, last: bool
    ) -> None:
        """`lists` names the list that holds each of the stage's modules, in order."""
        self.passages, self.stage, self.lists, self.last = passages, stage, lists, last
        self.modules: dict[str, nn.Module] = {}
        # For each module its name, its list, its class and the stage's modules after it.
        self._places: dict[nn.Module, tuple[str, str, str, list[nn.Module]]] = {}

    def watch(self, model: nn.Module) -> None:
        """Surround the stage's modules in a model."""
        modules = {name: model.get_submodule(name) for name in self.lists}
        if modules == self.modules and all(map(is_surrounded, modules.values())):
            return
        for module in self._places:
            release(module, self)
        self.modules, later = modules, list(modules.values())
        self._places = {
            module: (name, self.lists[name], kind_of(module), later[place:])
            for place, (name, module) in enumerate(modules.items(), 1)
        }
        for module in self._places:
            surround(module, self)

    def running(self) -> Passage | None:
        """Return the running forward if it is this stage's, or None."""
        passage = self.passages.running
        return passage if passage is not None and passage.source[0] == self.stage else None

    def takes_forward(self) -> bool:
        """Return whether the stage's forward is running, in which case the model makes the call."""
        return self.running() is not None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call, with received tensors in place of their stand-ins."""
        if torch.compiler.is_compiling() or _changes_nothing(module):
            return args, kwargs
        passage, (name, *_) = self.running(), self._places[module]
        if passage is not None:
            if passage.furthest != self.stage:
                passage.reach(self.stage, f"{name} is on stage {self.stage} of the pipeline")
            if passage.over:  # a call after the stage's last module
                passage.come_back()
            passage.inside += 1
            args, kwargs = passage.take(name, (args, kwargs))
        elif self.passages.running is None:
            args, kwargs = with_received((args, kwargs))
        for argument, value in chain(enumerate(args), kwargs.items()):
            if has_stand_ins(value):
                raise InvalidArgumentError(
                    f"{describe_rank()}: {name} is given, as argument {argument}, {_UNKNOWN}"
                )
        return args, kwargs

    def after(self, module: nn.Module, output: Any) -> Any:
        """Note the output of a call, and return the output for the model's code."""
        passage = self.running()
        if passage is None:
            return output
        name, siblings, kind, later = self._places[module]
        if not self.last and not later:
            output = passage.leave(output)
        if torch.compiler.is_compiling() or _changes_nothing(module):
            return output
        passage.inside -= 1
        if has_stand_ins(output):  # read from outside the module's arguments
            raise InvalidArgumentError(f"{describe_rank()}: {name} computes with {_UNKNOWN}")
        if not self.last:
            passage.left = output
            if siblings != name:
                passage.samples[siblings] = passage.kinds[kind] = output
            # Modules that change nothing, such as a final dropout in eval mode, need no call.
            passage.over = all(map(_changes_nothing, later))
            if not passage.over:
                passage.note(output)
        return output


def _changes_nothing(module: nn.Module) -> bool:
    """Return whether a module returns its argument unchanged, such as dropout in eval mode."""
    if not isinstance(module, (nn.Identity, _DropoutNd)):
        return False
    drops = isinstance(module, _DropoutNd) and module.training and module.p
    return not (drops or module._forward_hooks or module._forward_pre_hooks)


def check_crossed(model: nn.Module, crossed: Iterable[str]) -> None:
    """Refuse compilation and full backward hooks of modules that span several stages.

    Such a module cannot be compiled as a whole, since the compiler takes no stand-ins. Its full
    backward hook would wait for the gradients of its output and of its input, and no stage has
    both.
    """
    for path in crossed:
        module, name = model.get_submodule(path), path or "the model"
        if module._compiled_call_impl is not None:
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} is compiled as a whole, but spans several stages of "
                "the pipeline, whose hidden states would not be seen: compile its layers one by "
                "one (layer.compile())"
            )
        if module._backward_hooks and module._is_full_backward_hook:
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} ({type(module).__name__}) has a full backward hook, "
                "but its input and its output are on different stages of the pipeline, so the hook "
                "would never run: register it on the layers inside, or use no pipeline (pp_size=1)"
            )


@contextmanager
def examining(passage: Passage) -> Iterator[None]:
    """Run the forward in this context uncompiled, and explain failures of the model's own code."""
    with eagerly(), Following(passage):
        try:
            yield
        except (ScaletorchError, DistError):
            raise
        except Exception as error:
            if passage.inside:  # a layer's own failure
                raise
            text = " ".join(str(error).split()) or "no message"
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's own code between its layers raised "
                f"{type(error).__name__} ({text}). On this stage, modules of other stages return "
                "tensors without values, of the shape of their input or of the outputs of this "
                "stage's layers. If the code runs in one process, it needs more than that: compute "
                "it inside the layers, make it an entry of the micro-batch, or use no pipeline "
                "(pp_size=1)"
            ) from error


class Following(TorchFunctionMode):
    """A mode that notes the results of operations on noted tensors."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self._passage = passage

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and note its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, dependent = getattr(func, "__name__", ""), self._passage.dependent
        if self._passage.inside or name in OF_FORM_ALONE or not dependent:
            return result
        if any(tensor in dependent for tensor in tensors_in((args, kwargs))):
            self._passage.note(result)
            if name == "__setitem__":
                self._passage.note(args[0])
        return result

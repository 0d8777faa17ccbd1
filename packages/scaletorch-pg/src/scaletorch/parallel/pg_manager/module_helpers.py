"""Module helpers for all strategies: compilation, classes, copies, names, marks, a wrapper."""

from __future__ import annotations

import copy
import difflib
import importlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ...dist import group_ranks
from ...dist.errors import StateError
from .manager import describe_rank


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules eagerly, so that their operations and autograd graphs are visible.

    The compiler skips a function for good if it first sees it under a dispatch mode; inside this
    block it sees none.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


P = ParamSpec("P")
R = TypeVar("R")

# Functions that communicate or use other random streams are not compiled: each call of one is a
# graph break.
_hides: list[Callable[[], None]] = []  # each hides one decorated function from the compiler


def uncompiled(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that neither it nor the functions it calls are compiled."""
    return _outside(call, recursive=True)


def around_compiled(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it is not compiled, but the functions it calls are."""
    return _outside(call, recursive=False)


def _outside(call: Callable[P, R], recursive: bool) -> Callable[P, R]:
    # `torch.compiler.disable` imports the compiler at decoration, which takes seconds even in a
    # program that never compiles. So decoration waits for the compiler: it traces the first call
    # of `outside`, takes the `is_compiling` branch, and cannot trace `_hide_all`. That frame then
    # runs in Python and hides every decorated function at once; otherwise each function would
    # cost a graph and a graph break at its own first call.
    hidden: list[Callable[P, R]] = []

    def hide() -> None:
        dynamo = importlib.import_module("torch._dynamo.decorators")
        dynamo.skip(outside)  # from now on this wrapper is not traced either
        hidden[:] = [dynamo.disable(call) if recursive else dynamo.skip(call)]

    @wraps(call)
    def outside(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # the first time, and after a reset of the compiler
            _hide_all()
        return hidden[0](*args, **options) if hidden else call(*args, **options)

    _hides.append(hide)
    return outside


def _hide_all() -> None:
    for hide in _hides:
        hide()


M = TypeVar("M", bound=nn.Module)


_subclasses: dict[Any, type[Any]] = {}


def class_before(mixin: type[nn.Module], own: type[nn.Module], name: str) -> type[Any]:
    """Return the class `name` with the bases (`mixin`, `own`); equal calls return the same one."""
    if (mixin, own, name) not in _subclasses:
        # Report the origin and docstring of the module's own class.
        place = {"__module__": own.__module__, "__doc__": own.__doc__}
        _subclasses[mixin, own, name] = types.new_class(
            name, (mixin, own), None, lambda n: n.update(place)
        )
    return _subclasses[mixin, own, name]


def deep_copy(module: M, own: Callable[[Any], M] | None, memo: dict[int, Any]) -> M:
    """Return a deep copy of a module that refuses pickling; `own` is its class's `__deepcopy__`."""
    return own(memo) if own is not None else _twin(module, partial(copy.deepcopy, memo=memo), memo)


def shallow_copy(module: M) -> M:
    """Return a shallow copy of a module that refuses pickling."""
    return _twin(module, dict, {})


def _twin(module: M, copied: Callable[[Any], Any], memo: dict[int, Any]) -> M:
    twin: M = object.__new__(type(module))
    memo[id(module)] = twin
    state: Any = module.__getstate__()  # type: ignore[no-untyped-call]
    twin.__setstate__(copied(state))  # type: ignore[no-untyped-call]
    return twin


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the dotted names that a pattern matches in full.

    `*` matches any text and `?` one character inside one component; a component `**` matches any
    number of components, including none; "" is the root module.
    """
    wild = {"*": "[^.]*", "?": "[^.]"}
    compiled = re.compile(
        "".join(
            r"(?:[^.]+\.)*"
            if component == "**"
            else "".join(wild.get(c, re.escape(c)) for c in component) + r"\."
            for component in (pattern.split(".") if pattern else [])
        )
    )
    return [name for name in names if compiled.fullmatch(f"{name}." if name else "")]


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Return the error message for a pattern that matches nothing, with the nearest names."""
    close = difflib.get_close_matches(pattern.replace("**.", ""), [n for n in names if n], n=3)
    hint = f"; nearest module names: {', '.join(close)}" if close else ""
    return f"pattern '{pattern}' of the plan matches no module{hint}"


_MARK = "_scaletorch_divided"


def mark_divided(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Mark the parameters of a module and its submodules as divided over the ranks of `group`.

    The caller is responsible for the module's communication and for its gradient sums.
    """
    vars(module)[_MARK] = () if group is None else tuple(group_ranks(group))


def divided_modules(model: nn.Module, over: ProcessGroup | None = None) -> set[nn.Module]:
    """Return the modules marked by `mark_divided` and all their submodules.

    Modules divided over ranks of which `over` contains at most one are left out.
    """
    ranks = None if over is None else {*group_ranks(over)}
    found: set[nn.Module] = set()
    for module in model.modules():
        of = vars(module).get(_MARK)
        if of is not None and (ranks is None or not of or len(ranks.intersection(of)) > 1):
            found.update(module.modules())
    return found


_STAGED = "_runs_as_stages"


def mark_staged(model: nn.Module) -> None:
    """Mark a model as running in stages, so that its own forward output is not used."""
    vars(model)[_STAGED] = True


def runs_as_stages(model: nn.Module) -> bool:
    """Return whether a model runs in stages, each of which calls `show_output`."""
    return bool(vars(model).get(_STAGED, False))


def show_output(model: nn.Module, output: Any) -> None:
    """Pass a stage's output, such as its hidden states, to the forward hooks with a `look`."""
    for hook in model._forward_hooks.values():
        if hasattr(hook, "look"):
            hook.look(model, output)


_STEP = "prepare_inputs_for_generation"  # the method that marks generating models of transformers


def refuse_generate(model: nn.Module, why: str) -> None:
    """Make `generate` of a model, and of transformers models inside it, raise; in place.

    The error message contains `why`, a clause that says what each rank holds.
    """
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "generate") and (module is model or hasattr(kind, _STEP)):
            vars(module)["generate"] = partial(_refuse, kind.__name__, why)


def _refuse(name: str, why: str, *_: Any, **__: Any) -> NoReturn:
    raise StateError(
        f"{describe_rank()}: {name}.generate calls the model's own forward for each token, and "
        f"{why}: generate on a grid of tensor and data parallelism alone (cp_size=1, pp_size=1), "
        "or export the weights and generate in one process"
    )


class ModuleWrapper(nn.Module):
    """Base class of the strategies' wrappers: holds `module` and adds no prefix to its names.

    `named_modules`, `named_parameters`, `named_buffers`, `state_dict` and `load_state_dict` act on
    `module`, also if wrappers nest or sit inside another module. Attributes that the wrapper lacks
    are looked up in `module`, and `forward` calls `module`. Forward and backward hooks registered
    on a wrapper go to `module`, and global hooks do not see wrappers.

    Args:
        module: The module to wrap.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` without hooks: they run on the wrapped module."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register the hook on the wrapped module."""
        return self.module.register_full_backward_hook(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module's forward in place; the wrappers' own code stays eager."""
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped module's attribute if the wrapper has none of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not initialised yet, as during unpickling
                raise
        return getattr(self.module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapped module's names and modules; the wrapper itself is not listed."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the wrapped module's state."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Runs only if a parent loads, which passes its private copy of names without the prefix;
        # torch loads the child under its registered name.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

"""Helpers of all strategies for modules: modes, classes, copies, names, marks, watchers."""

from __future__ import annotations

import copy
import difflib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...dist import group_ranks
from ...dist.errors import StateError
from .axis import describe_rank


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; afterwards each module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules as they are written, so that their operations and graphs can be seen.

    The compiler skips for good what it first meets under a dispatch mode; here it meets nothing.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


M = TypeVar("M", bound=nn.Module)

_SUBCLASSES: dict[tuple[type[nn.Module], type[nn.Module], str], type[Any]] = {}


def class_before(mixin: type[nn.Module], own: type[nn.Module], name: str) -> type[Any]:
    """Return the class of that name of a mixin and then a module's own class.

    It is made once, so that modules of one class stay of one class.
    """
    key = mixin, own, name
    if key not in _SUBCLASSES:
        # Who asks where a class comes from means the module's own one.
        place = {"__module__": own.__module__, "__doc__": own.__doc__}
        _SUBCLASSES[key] = types.new_class(
            name, (mixin, own), exec_body=lambda namespace: namespace.update(place)
        )
    return _SUBCLASSES[key]


def deep_copy(module: M, own: Callable[[Any], M] | None, memo: dict[int, Any]) -> M:
    """Return a deep copy of a module that refuses to be pickled, which copies are made by.

    Args:
        module: Of a class that a strategy made.
        own: The `__deepcopy__` of the module's own class, if it has one.
        memo: What has been copied.
    """
    return own(memo) if own is not None else _twin(module, partial(copy.deepcopy, memo=memo), memo)


def shallow_copy(module: M) -> M:
    """Return a shallow copy of such a module."""
    return _twin(module, dict, {})


def _twin(module: M, copied: Callable[[Any], Any], memo: dict[int, Any]) -> M:
    twin: M = object.__new__(type(module))
    memo[id(module)] = twin
    state: Any = module.__getstate__()  # type: ignore[no-untyped-call]
    twin.__setstate__(copied(state))  # type: ignore[no-untyped-call]
    return twin


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the dotted names that a pattern matches as a whole.

    `*` and `?` stand for any text and one character inside one component, a component `**` for
    any number of components, none included; "" is the root module.
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
    """Return the words for a pattern that matches nothing, with the names that are nearest."""
    close = difflib.get_close_matches(pattern.replace("**.", ""), [n for n in names if n], n=3)
    hint = f"; nearest module names: {', '.join(close)}" if close else ""
    return f"pattern '{pattern}' of the plan matches no module{hint}"


_MARK = "_scaletorch_divided"


def mark_divided(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Say of a module that its parameters, and those of modules in it, are divided already.

    Whoever does so sends what the module needs, and says over which ranks gradients are summed.

    Args:
        module: The module.
        group: The ranks that have the others; None leaves them unsaid.
    """
    vars(module)[_MARK] = () if group is None else tuple(group_ranks(group))


def divided_modules(model: nn.Module, over: ProcessGroup | None = None) -> set[nn.Module]:
    """Return the modules that are marked so, and all in them.

    Args:
        model: Any module.
        over: Leave out what is divided over ranks of which this group has this one alone.
    """
    ranks = None if over is None else {*group_ranks(over)}
    marked = [module for module in model.modules() if _is_divided(module, ranks)]
    return {inner for module in marked for inner in module.modules()}


def _is_divided(module: nn.Module, ranks: set[int] | None) -> bool:
    of = vars(module).get(_MARK)
    return of is not None and (ranks is None or not of or len(ranks.intersection(of)) > 1)


Watcher = Callable[[nn.Module, Any], None]  # called with the model and the output that goes on

_WATCHERS, _STAGED = "_output_watchers", "_runs_as_stages"


def watch_outputs(model: nn.Module, watcher: Watcher) -> None:
    """Let a function see the output of each of a model's stages, once it runs as stages."""
    vars(model).setdefault(_WATCHERS, []).append(watcher)


def forget_watchers(model: nn.Module, kind: type) -> None:
    """Drop the watchers that are methods of objects of a class."""
    known = vars(model).get(_WATCHERS, [])
    known[:] = [each for each in known if not isinstance(getattr(each, "__self__", None), kind)]


def mark_staged(model: nn.Module) -> None:
    """Note that a model runs as stages, so that its own output is not what goes on."""
    vars(model)[_STAGED] = True


def runs_as_stages(model: nn.Module) -> bool:
    """Return whether a model runs as stages, each of which shows its output."""
    return bool(vars(model).get(_STAGED, False))


def show_output(model: nn.Module, output: Any) -> None:
    """Show the output of a stage to all that watch.

    Args:
        model: The model that runs as stages.
        output: What it passes on, or what the model returns.
    """
    for watcher in vars(model).get(_WATCHERS, ()):
        watcher(model, output)


_STEP = "prepare_inputs_for_generation"  # by which models of transformers generate


def refuse_generate(model: nn.Module, why: str) -> None:
    """Let `generate` of a model, and of models of transformers within it, raise; in place.

    Args:
        model: Its own `generate`, if it has one, calls its forward for every token.
        why: What each rank has, for the error.
    """
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "generate") and (module is model or hasattr(kind, _STEP)):
            vars(module)["generate"] = partial(_refuse, kind.__name__, why)


def _refuse(name: str, why: str, *_: Any, **__: Any) -> NoReturn:
    """Raise whatever is asked for.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{describe_rank()}: {name}.generate calls the model's own forward for each token, and "
        f"{why}: generate on a grid of tensor and data parallelism alone (cp_size=1, pp_size=1), "
        "or export the weights and generate in one process"
    )

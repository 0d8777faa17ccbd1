"""Gates around a stage's modules: whether each gets what it gets in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import main_argument
from ..splitting.modules import changes_nothing
from .cut import Passage
from .stand_ins import plain, stands

_BESIDE = (
    "a tensor that the model's forward makes from hidden states, or with a module of another "
    "stage: a skip connection, the embedding's output, a condition that is embedded once for all "
    "layers. It is another tensor here than in one process; let layers pass it on, with the hidden "
    "states in one tuple, or compute it in every layer"
)


def check_output(output: Any) -> None:
    """Check the model's output on the last stage.

    Raises:
        InvalidArgumentError: It holds a stand-in.
    """
    if stands(output):
        raise InvalidArgumentError(f"{describe_rank()}: the model returns {_BESIDE}")


class Gates:
    """Let no stand-in into a stage's modules, but the hidden states into the first.

    Args:
        passage: The forward that runs.
        untouched: Checks that the model's own code has left the hidden states as they came.
        last: Whether it is the model's last stage.
    """

    def __init__(self, passage: Passage, untouched: Callable[[], None], *, last: bool) -> None:
        self._passage, self._untouched, self._last = passage, untouched, last
        self._modules: dict[str, nn.Module] = {}
        self._hooks: list[Any] = []

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Put gates around these modules, in order, in place of those before."""
        if all(self._modules.get(name) is module for name, module in modules.items()):
            return
        for hook in self._hooks:
            hook.remove()
        self._modules, own = dict(modules), list(modules.values())
        self._hooks = []
        for place, (name, module) in enumerate(modules.items()):
            before = _Gate(self._before(name))
            after = _Gate(self._after(name, own[place + 1 :]))
            self._hooks += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def __getstate__(self) -> None:
        """Leave nothing in a copy, which comes with that of a module: no pipeline runs it."""

    def start(self) -> None:
        """Put the gates of compiled modules outside what is compiled."""
        modules = list(self._modules.values())
        for place, (name, module) in enumerate(self._modules.items()):
            compiled = module._compiled_call_impl
            if compiled is not None and not isinstance(compiled, _Outside):
                before, after = self._before(name), self._after(name, modules[place + 1 :])
                module._compiled_call_impl = _Outside(module, compiled, before, after)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the modules."""
        for module in self._modules.values():
            yield from module.parameters()

    def _before(self, name: str) -> _Before:
        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            passage = self._passage
            if torch.compiler.is_compiling() or changes_nothing(module):
                return None
            if not passage.active:  # recomputed
                return (plain(args), plain(kwargs)) if stands((args, kwargs)) else None
            passage.inside += 1
            first, passage.entered = not passage.entered, True
            if first:
                self._untouched()
            if not stands((args, kwargs)):
                return None
            entries = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}
            main = main_argument(args, kwargs, passage.received) if first else None
            for argument, value in entries.items():
                if argument != main and stands(value):
                    raise InvalidArgumentError(
                        f"{describe_rank()}: {name} is given, as argument {argument}, {_BESIDE}"
                    )
            opened = {main: passage.opened(entries[main])} if main else {}
            args = tuple(opened.get(str(place), arg) for place, arg in enumerate(args))
            return args, {**kwargs, **{n: v for n, v in opened.items() if n in kwargs}}

        return check

    def _after(self, name: str, following: Sequence[nn.Module]) -> _After:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            passage = self._passage
            if torch.compiler.is_compiling() or changes_nothing(module) or not passage.active:
                return
            passage.inside -= 1
            if stands(output):  # it came by another way than an argument
                raise InvalidArgumentError(f"{describe_rank()}: {name} computes with {_BESIDE}")
            passage.left = output
            passage.over = not self._last and all(map(changes_nothing, following))

        return note


class _Gate:
    """A hook that a copy of its module does not have: no pipeline runs that."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *given: Any) -> Any:
        return self._hook(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gate, (_open,)


def _open(*given: Any) -> None:
    """Let everything through."""


_Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_After = Callable[[nn.Module, tuple[Any, ...], Any], None]


class _Outside:
    """A compiled call with gates around it: the compiler sees no stand-ins."""

    def __init__(
        self, module: nn.Module, compiled: Callable[..., Any], before: _Before, after: _After
    ) -> None:
        self._module, self._compiled, self._before, self._after = module, compiled, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._before(self._module, args, kwargs) or (args, kwargs)
        output = self._compiled(*args, **kwargs)
        self._after(self._module, args, output)
        return output

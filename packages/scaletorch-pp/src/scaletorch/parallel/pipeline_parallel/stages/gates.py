"""Gates around a stage's modules: whether each gets what it gets in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .beside import again
from .passage import Passage
from .stand_ins import stands

_BESIDE = (
    "a tensor that the model's forward makes from hidden states, or with a module of another "
    "stage: a skip connection, the embedding's output, a condition that is embedded once for all "
    "layers. This stage does not have it; let layers pass it on, with the hidden states in one "
    "tuple, or compute it in every layer"
)


def check_output(output: Any) -> None:
    """Check the model's output on the last stage.

    Raises:
        InvalidArgumentError: It holds a stand-in.
    """
    if stands(output):
        raise InvalidArgumentError(f"{describe_rank()}: the model returns {_BESIDE}")


class Gates:
    """Let no stand-in into a stage's modules.

    Args:
        passage: The forward that runs.
        stage: The stage.
        last: Whether it is the model's last stage.
    """

    def __init__(self, passage: Passage, stage: int, *, last: bool) -> None:
        self._passage, self._stage, self._last = passage, stage, last
        self._modules: dict[str, nn.Module] = {}
        self._hooks: list[Any] = []

    def watch(self, modules: Mapping[str, nn.Module], siblings: Mapping[str, str]) -> None:
        """Put gates around these modules, in order, in place of those before.

        Args:
            modules: The stage's, by name.
            siblings: The list that each is in.
        """
        if all(self._modules.get(name) is module for name, module in modules.items()):
            return
        for hook in self._hooks:
            hook.remove()
        self._modules, self._siblings, self._hooks = dict(modules), siblings, []
        for name, module in modules.items():
            before, after = _Gate(self._before(name)), _Gate(self._after(name))
            self._hooks += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def __getstate__(self) -> None:
        """Leave nothing in a copy, which comes with that of a module: no pipeline runs it."""

    def start(self) -> None:
        """Put the gates of compiled modules outside what is compiled."""
        for name, module in self._modules.items():
            compiled = module._compiled_call_impl
            if compiled is not None and not isinstance(compiled, _Outside):
                outside = _Outside(module, compiled, self._before(name), self._after(name))
                module._compiled_call_impl = outside

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the modules."""
        for module in self._modules.values():
            yield from module.parameters()

    def _runs(self) -> bool:
        return self._passage.active and self._passage.source[0] == self._stage

    def _before(self, name: str) -> _Before:
        where = f"{name} is on stage {self._stage} of the pipeline"

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            passage = self._passage
            if torch.compiler.is_compiling() or _changes_nothing(module):
                return None
            if self._runs():
                passage.reach(self._stage, where)
                passage.come_back()
                passage.inside += 1
                args, kwargs = passage.beside.take(name, (args, kwargs))
            elif not passage.active:
                args, kwargs = again((args, kwargs))
            if not stands((args, kwargs)):
                return args, kwargs
            args = tuple(map(passage.take, args))
            kwargs = {argument: passage.take(value) for argument, value in kwargs.items()}
            for argument, value in chain(enumerate(args), kwargs.items()):
                if stands(value):
                    raise InvalidArgumentError(
                        f"{describe_rank()}: {name} is given, as argument {argument}, {_BESIDE}"
                    )
            return args, kwargs

        return check

    def _after(self, name: str) -> _After:
        siblings = self._siblings[name]
        others = list(self._modules)[list(self._modules).index(name) + 1 :]

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            passage = self._passage
            if torch.compiler.is_compiling() or _changes_nothing(module) or not self._runs():
                return
            passage.inside -= 1
            if stands(output):  # it came by another way than an argument
                raise InvalidArgumentError(f"{describe_rank()}: {name} computes with {_BESIDE}")
            if not self._last:
                passage.left = passage.samples[siblings] = output
                passage.over = all(_changes_nothing(self._modules[other]) for other in others)
                if not passage.over:
                    passage.beside.note(output)

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


def _changes_nothing(module: nn.Module) -> bool:
    """Return whether a module returns its argument as it is, as a dropout that drops nothing."""
    drops = isinstance(module, _DropoutNd) and module.training and module.p
    return isinstance(module, nn.Identity | _DropoutNd) and not drops

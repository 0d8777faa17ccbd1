"""Gates around a stage's modules: whether each gets what it gets in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import is_hidden
from .beside import again
from .calls import is_surrounded, release, surround
from .passage import Passage, Passages, kind_of
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
    """Let no stand-in into a stage's modules, and take what the last of them returns.

    Args:
        passages: The forwards of the rank's stages.
        stage: The stage.
        last: Whether it is the model's last stage.
    """

    def __init__(self, passages: Passages, stage: int, *, last: bool) -> None:
        self.passages, self.stage, self.last = passages, stage, last
        self.modules: dict[str, nn.Module] = {}
        self._gates: list[tuple[nn.Module, _Gate]] = []

    def watch(self, modules: Mapping[str, nn.Module], siblings: Mapping[str, str]) -> None:
        """Put gates around these modules, in order, in place of those before.

        Args:
            modules: The stage's, by name.
            siblings: The list that each is in.

        Raises:
            InvalidArgumentError: The calls of one cannot be surrounded.
        """
        known = (self.modules.get(name) is each for name, each in modules.items())
        if all(known) and all(map(is_surrounded, modules.values())):
            return
        for module, gate in self._gates:
            release(module, gate)
        self.modules, self._gates = dict(modules), []
        for name, module in modules.items():
            gate = _Gate(self, name, siblings[name])
            surround(module, gate)
            self._gates.append((module, gate))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the modules."""
        for module in self.modules.values():
            yield from module.parameters()

    def other_samples(self, passage: Passage) -> dict[str, Any]:
        """Return what layers of other lists than the stage's last one have returned in containers.

        The next stage has what the last one returned, and later ones cannot tell what others do.
        """
        last = self._gates[-1][1].siblings if self._gates else ""
        return {
            name: sample
            for name, sample in passage.samples.items()
            if name not in self.modules
            and name != last
            and not isinstance(sample, Tensor)
            and is_hidden(sample)
        }

    def running(self) -> Passage | None:
        """Return the forward that runs if it is the stage's."""
        passage = self.passages.running
        return passage if passage is not None and passage.source[0] == self.stage else None


class _Gate:
    """The gate of one module.

    Args:
        gates: Those of the stage.
        name: The module's name.
        siblings: The list that it is in.
    """

    def __init__(self, gates: Gates, name: str, siblings: str) -> None:
        self._gates, self._name, self.siblings = gates, name, siblings
        self._where = f"{name} is on stage {gates.stage} of the pipeline"
        names = list(gates.modules)
        self._later = [gates.modules[other] for other in names[names.index(name) + 1 :]]

    def takes_forward(self) -> bool:
        """Return whether the stage runs, so that the model's code has asked for it."""
        return self._gates.running() is not None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call, with what has travelled for it.

        Raises:
            InvalidArgumentError: A stand-in is among them.
        """
        if torch.compiler.is_compiling() or _changes_nothing(module):
            return args, kwargs
        passage = self._gates.running()
        if passage is not None:
            passage.reach(self._gates.stage, self._where)
            passage.come_back()
            passage.inside += 1
            args, kwargs = passage.beside.take(self._name, (args, kwargs))
        elif self._gates.passages.running is None:
            args, kwargs = again((args, kwargs))
        if not stands((args, kwargs)):
            return args, kwargs
        for argument, value in chain(enumerate(args), kwargs.items()):
            if stands(value):
                raise InvalidArgumentError(
                    f"{describe_rank()}: {self._name} is given, as argument {argument}, {_BESIDE}"
                )
        return args, kwargs

    def after(self, module: nn.Module, output: Any) -> Any:
        """Note what a call returned; return what the model's code gets.

        Raises:
            InvalidArgumentError: It is a stand-in.
        """
        passage, last = self._gates.running(), self._gates.last
        if passage is None:
            return output
        if not last and not self._later:
            output = passage.leave(output)
        if torch.compiler.is_compiling() or _changes_nothing(module):
            return output
        passage.inside -= 1
        if stands(output):  # it came by another way than an argument
            raise InvalidArgumentError(f"{describe_rank()}: {self._name} computes with {_BESIDE}")
        if not last:
            passage.left = passage.samples[self.siblings] = output
            if self.siblings != self._name:
                passage.kinds[kind_of(module)] = output
            passage.over = all(map(_changes_nothing, self._later))
            if not passage.over:
                passage.beside.note(output)
        return output


def _changes_nothing(module: nn.Module) -> bool:
    """Return whether a module returns its argument as it is, as a dropout that drops nothing."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    drops = isinstance(module, _DropoutNd) and module.training and module.p
    return isinstance(module, nn.Identity | _DropoutNd) and not (drops or hooked)

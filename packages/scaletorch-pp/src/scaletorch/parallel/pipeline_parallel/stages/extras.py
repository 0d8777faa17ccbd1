"""Extra tensors that modules of later stages take, which are sent with the hidden states.

Examples are the embedding's output, a condition embedded once for all layers, or a skip connection.
A stage runs the model's whole forward, so it sees the calls of other stages' modules with the
arguments that it has computed for them. The first forward of a kind finds the arguments that depend
on its own modules and so exist nowhere else: it runs uncompiled, follows each tensor's origin, and
has its failures explained. Later forwards send the same arguments.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly
from ..runtime.forms import NOTHING, Form
from .stand_ins import OF_FORM_ALONE, StandIn

_CARRIED = "carried"


class Place(NamedTuple):
    """An argument of a call."""

    module: int  # its index among the modules of all stages
    call: int  # the number of the call in a forward, from 1
    tensor: int  # the index of the tensor among those in the arguments


class Passed(NamedTuple):
    """A value that a stage passes on if it sends more than hidden states."""

    hidden: Any
    tensors: list[Tensor]  # the extra tensors; those of the same form are stacked
    places: dict[Place, tuple[int, int]]  # an argument's stack, and its index in the stack
    forms: Form = NOTHING  # outputs of layers of other lists, such as an encoder's, by list


class Extras:
    """The extra tensors that one forward of a stage receives, and sends, with hidden states.

    Args:
        numbers: The index of each module among those of all stages, by name.
        own: The stage's modules.
        known: Arguments of later stages' modules to send. The first forward of a kind adds to them.
        given: The value received from the previous stage, or the input of the first stage.
        examines: Whether this forward is the first of its kind.

    Attributes:
        hidden: The hidden states in `given`.
        forms: Outputs of layers of earlier stages on the meta device, by the list of the layers.
        made: Tensors that depend on the stage's modules; None unless the forward is examined.
        inside: The number of running calls of this stage's modules, nested ones included.
    """

    def __init__(
        self,
        numbers: Mapping[str, int],
        own: Iterable[str],
        known: set[Place],
        given: Any,
        *,
        examines: bool,
    ) -> None:
        self._numbers, self._known = numbers, known
        passed = given if isinstance(given, Passed) else Passed(given, [], {})
        self.hidden, self.forms = passed.hidden, dict(passed.forms.value)
        self._received = {
            place: passed.tensors[stack][index] for place, (stack, index) in passed.places.items()
        }
        self.made = WeakTensorKeyDictionary() if examines else None
        self.inside = 0
        modules = {numbers[name] for name in own}
        self._leaving = {
            place: (tensor, version_of(tensor))
            for place, tensor in self._received.items()
            if place.module not in modules
        }
        self._calls: Counter[str] = Counter()

    def note(self, value: Any) -> None:
        """Record tensors that depend on this stage's modules."""
        if self.made is not None:
            for tensor in tensors_in(value):
                self.made[tensor] = True

    def offer(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments of a later stage's module that its stage cannot compute itself."""
        module, call = self._next(name)
        if self.made is None and not self._known:
            return
        for index, tensor in enumerate(tensors_in((args, kwargs))):
            place = Place(module, call, index)
            if isinstance(tensor, StandIn):
                continue
            if self.made is not None and tensor in self.made:
                self._known.add(place)
            if place in self._known:
                self._leaving[place] = tensor, version_of(tensor)

    def take(self, name: str, given: Any) -> Any:
        """Return the arguments of a module of this stage, with received tensors in place."""
        module, call = self._next(name)
        if not self._received:
            return given
        places = itertools.count()

        def taken(tensor: Tensor) -> Tensor:
            found = self._received.get(Place(module, call, next(places)))
            if found is None or not isinstance(tensor, StandIn):
                return tensor
            tensor.carried = found  # used again when the backward recomputes the layer
            return found

        return map_tensors(taken, given)

    def leave(self, hidden: Any, samples: Mapping[str, Any]) -> Any:
        """Return the value to send: hidden states, alone or with extra tensors.

        `samples` are outputs of layers, by their list, whose form later stages cannot know.
        """
        if not self._leaving and not samples:
            return hidden
        if any(version_of(tensor) != version for tensor, version in self._leaving.values()):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward changes, in place, a tensor that modules "
                "of later stages are given, after one was given it; let it make a new one"
            )
        stacks: dict[Hashable, list[Tensor]] = {}
        places = {}
        for place, (tensor, _) in self._leaving.items():
            form = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
            stack = stacks.setdefault(form, [])
            index = next((i for i, other in enumerate(stack) if other is tensor), len(stack))
            if index == len(stack):
                stack.append(tensor)
            places[place] = list(stacks).index(form), index
        tensors = [torch.stack(stack) for stack in stacks.values()]
        return Passed(hidden, tensors, places, Form(dict(samples)))

    def tensors(self) -> list[Tensor]:
        """Return the extra tensors to send."""
        return [tensor for tensor, _ in self._leaving.values()]

    def _next(self, name: str) -> tuple[int, int]:
        self._calls[name] += 1
        return self._numbers[name], self._calls[name]


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def arrived(value: Any) -> Any:
    """Return a value with received tensors in place of their stand-ins."""
    return map_tensors(lambda tensor: getattr(tensor, _CARRIED, tensor), value)


@contextmanager
def examining(extras: Extras) -> Iterator[None]:
    """Run the forward in this context uncompiled, and explain failures of the model's own code."""
    with eagerly(), Following(extras):
        try:
            yield
        except (ScaletorchError, DistError):
            raise
        except Exception as error:
            if extras.inside:  # a layer's own failure
                raise
            raise InvalidArgumentError(_failed(error)) from error


def _failed(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return (
        f"{describe_rank()}: the model's own code between its layers fails where modules are "
        "another stage's, which return tensors without values, of the shape that they are given "
        f"or that layers of this stage return: it raised {type(error).__name__} ({text}). If it "
        "runs in one process, it needs something else from them: compute that inside the layers, "
        "make it an entry of the micro-batch, or use no pipeline (pp_size=1)"
    )


class Following(TorchFunctionMode):
    """A mode that notes the results of operations on noted tensors."""

    def __init__(self, extras: Extras) -> None:
        super().__init__()
        self._extras = extras

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
        name, made = getattr(func, "__name__", ""), self._extras.made
        if self._extras.inside or name in OF_FORM_ALONE or not made:
            return result
        if any(tensor in made for tensor in tensors_in((args, kwargs))):
            self._extras.note(result)
            if name == "__setitem__":
                self._extras.note(args[0])
        return result

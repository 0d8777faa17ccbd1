"""Tensors that modules of later stages are given beside hidden states: they travel with these.

Such are the embedding's output, a condition that is embedded once for all layers, a skip.
A stage runs the model's whole forward, so it meets the calls of modules that it does not have with
what it has computed for them. Which of that was made with its own modules, and is nowhere else, the
first forward of a kind finds: it runs uncompiled, follows what is computed of what, and has its
failures explained. Later ones look at the same arguments.
"""

from __future__ import annotations

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
    """An argument of a call.

    Attributes:
        module: The module's number among those of all stages.
        call: Which of its calls in a forward.
        tensor: Which of the tensors in its arguments.
    """

    module: int
    call: int
    tensor: int


class Passed(NamedTuple):
    """A value that a stage passes on if it is not hidden states alone.

    Attributes:
        hidden: The hidden states.
        tensors: The tensors that travel beside them; those of one form are stacked.
        places: For each argument the stack of its tensor, and its index in that.
        visit: Which call of the stage's last module has returned the hidden states.
        forms: What layers of other lists return, such as an encoder's.
    """

    hidden: Any
    tensors: list[Tensor]
    places: dict[Place, tuple[int, int]]
    visit: int
    forms: Form


class Extras:
    """The tensors that one forward of a stage is given, and passes on, beside hidden states.

    Args:
        numbers: The number of each module among those of all stages, by name.
        own: The stage's modules.
        known: Arguments of later stages' modules that travel. The first forward of a kind adds to
            them.
        given: What the stage before has passed on.
        examines: Whether this forward is the first of its kind.

    Attributes:
        hidden: The hidden states in what was given.
        visit: Which call of the last module of the stage before returned them.
        forms: What layers of earlier stages return, by their list, on the meta device.
        made: Tensors that the stage's modules have made, while a forward is examined.
        inside: How many modules of this stage are running, one in another.
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
        passed = given if isinstance(given, Passed) else Passed(given, [], {}, 1, NOTHING)
        self.hidden, self.visit, self.forms = passed.hidden, passed.visit, dict(passed.forms.value)
        self._received = {
            place: passed.tensors[stack][at] for place, (stack, at) in passed.places.items()
        }
        self.made = WeakTensorKeyDictionary() if examines else None
        self.inside = 0
        here = {numbers[name] for name in own}
        self._leaving = {
            place: (tensor, version_of(tensor))
            for place, tensor in self._received.items()
            if place.module not in here
        }
        self._calls: Counter[str] = Counter()

    def note(self, value: Any) -> None:
        """Note tensors that this stage's modules have made."""
        if self.made is not None:
            for tensor in tensors_in(value):
                self.made[tensor] = True

    def offer(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep what a module of a later stage is given, if that stage lacks it."""
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
        """Return what a module of this stage is given, with what has travelled for it."""
        module, call = self._next(name)
        if not self._received:
            return given
        places = iter(range(1_000_000))

        def taken(tensor: Tensor) -> Tensor:
            found = self._received.get(Place(module, call, next(places)))
            if found is None or not isinstance(tensor, StandIn):
                return tensor
            tensor.carried = found  # for when its layer is recomputed
            return found

        return map_tensors(taken, given)

    def leave(self, hidden: Any, visit: int, samples: Mapping[str, Any]) -> Any:
        """Return what a stage passes on: hidden states, and what travels with them.

        Args:
            hidden: The hidden states.
            visit: Which call of the stage's last module has returned them.
            samples: What layers of other lists have returned, in containers: their forms travel.

        Raises:
            InvalidArgumentError: It was written to since a module was given it.
        """
        if not self._leaving and visit == 1 and not samples:
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
            alike = stacks.setdefault(form, [])
            at = next((i for i, other in enumerate(alike) if other is tensor), len(alike))
            if at == len(alike):
                alike.append(tensor)
            places[place] = list(stacks).index(form), at
        tensors = [torch.stack(alike) for alike in stacks.values()]
        return Passed(hidden, tensors, places, visit, Form(dict(samples)))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that travel."""
        return [tensor for tensor, _ in self._leaving.values()]

    def _next(self, name: str) -> tuple[int, int]:
        self._calls[name] += 1
        return self._numbers[name], self._calls[name]


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def arrived(value: Any) -> Any:
    """Return a value with tensors that have travelled, in the place of their stand-ins."""
    return map_tensors(lambda tensor: getattr(tensor, _CARRIED, tensor), value)


@contextmanager
def examining(extras: Extras) -> Iterator[None]:
    """Run the forward in this context uncompiled, and tell why the model's own code may fail.

    Raises:
        InvalidArgumentError: It fails, which may be because this stage lacks modules.
    """
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
        f"another stage's, which return tensors of a form and without values: it raised "
        f"{type(error).__name__} ({text}). If it runs in one process, it takes something else of "
        "them than such tensors of the form that they are given, or that layers of this stage "
        "return: compute that inside the layers, make it an entry of the micro-batch, or use no "
        "pipeline (pp_size=1)"
    )


class Following(TorchFunctionMode):
    """While it is on, what is computed from tensors that are noted is noted too.

    Args:
        extras: What is noted of the forward that runs.
    """

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
        """Make the call, and note what it makes."""
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

"""The elements that an optimizer's update depends on, found by a trial on two small matrices.

An update that treats all elements the same way gives the parts of a matrix what it gives the whole.
One that looks at norms, rows or blocks does not, whatever its class is called. A new optimizer of
the same class and settings is tried, so that nothing of the program's own changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = 3  # the state of the first counts in the second, and what that changed in the third
# Shapes, and where they are cut. Parts are longer than 128, below which some do not factor. In the
# first no blocks fit; the second and its parts consist of whole ones, as some want it (torchao).
SHAPES = {(259, 263): (127, 130), (256, 384): (128, 192)}
LEARNING_RATE = 0.1
EXACT = 1e-5  # of an update in float32, what rounding explains: elements are computed alike

# What was found, by class, step, device and settings: several parts of a program ask.
_TRIED: dict[tuple[object, ...], Scope] = {}

Halves = tuple[Tensor, ...]


class Scope(IntEnum):
    """The elements that an update of one depends on, beside the step and the settings."""

    ELEMENT = 0
    PARAMETER = 1
    OTHERS = 2
    UNKNOWN = 3

    @property
    def words(self) -> str:
        """The words of messages for it."""
        return _WORDS[self]


_WORDS = {
    Scope.ELEMENT: "treats every element alike",
    Scope.PARAMETER: "looks at whole parameters",
    Scope.OTHERS: "looks at several parameters at once, or draws at random",
    Scope.UNKNOWN: "cannot be tried on a matrix of its own (its step takes a closure, its "
    "gradients must be sparse, or its constructor takes what its groups do not have), so that "
    "nobody knows what it looks at",
}


# Torch's own need no trial.
_KNOWN = {
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
         "Rprop", "SGD"),
        Scope.ELEMENT,
    ),
    **dict.fromkeys(("Adafactor", "Muon"), Scope.PARAMETER),
}  # fmt: skip
_SCOPES = {getattr(torch.optim, name): scope for name, scope in _KNOWN.items()}


def known_elementwise(optimizer: Optimizer) -> bool:
    """Return whether this is one of torch's own that treat all elements the same way."""
    return _SCOPES.get(type(optimizer)) is Scope.ELEMENT


def update_scope(optimizer: Optimizer) -> Scope:
    """Return how far an optimizer's update looks, the furthest of its groups.

    Args:
        optimizer: Any; another one of its class is made and tried, on its first parameter's
            device, and random generators are left as they were.
    """
    known = _SCOPES.get(type(optimizer))
    if known is not None:
        return known
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    tensors = (each for group in optimizer.param_groups for each in group["params"])
    device = next((each.device for each in tensors), torch.device("cpu"))
    generators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=generators, device_type=device.type):
        return max((_try(optimizer, group, device) for group in groups), default=Scope.ELEMENT)


def _try(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> Scope:
    """Return the scope of an optimizer's updates with the settings of a group."""
    kind, defaults = type(optimizer), optimizer.defaults
    key = kind, kind.step, device, repr(defaults), repr(group)
    if key not in _TRIED:
        try:
            _TRIED[key] = _compare(_Trial(kind, defaults, group), device)
        except Exception:  # of a program that is not ours: it cannot be made, or takes no matrix
            _TRIED[key] = Scope.UNKNOWN
    return _TRIED[key]


class _Trial:
    """Makes optimizers like one that is there, and returns what they do to matrices.

    Args:
        kind: The class.
        defaults: What it was made with.
        group: The settings of one of its groups.
    """

    def __init__(
        self, kind: type[Optimizer], defaults: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        self._kind = kind
        self._group, rate = dict(group), group.get("lr")
        if isinstance(rate, float | int):
            self._group["lr"] = LEARNING_RATE  # a schedule may begin at zero
        elif isinstance(rate, Tensor):
            self._group["lr"] = torch.full_like(rate, LEARNING_RATE)
        taken = inspect.signature(kind).parameters
        self._arguments = {
            key: value
            for key, value in {**defaults, **self._group}.items()
            if key in taken and key != "params"
        }

    def updates(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Halves:
        """Return what several steps of one optimizer add to matrices; they stay as they were."""
        parameters = [torch.nn.Parameter(each.clone()) for each in weights]
        optimizer = self._kind([{**self._group, "params": parameters}], **self._arguments)
        start = getattr(optimizer, "train", None)
        if callable(start):  # as schedule-free ones want it
            start()
        # Not through hooks, which are others' and this one's caller.
        step = getattr(self._kind.step, "__wrapped__", self._kind.step)
        for number in range(STEPS):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient * torch.cos(number * gradient)
            step(optimizer)
        found = zip(parameters, weights, strict=True)
        return tuple(parameter.detach() - before for parameter, before in found)

    def apart(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Halves:
        """Return the same of one optimizer for each."""
        pairs = zip(weights, gradients, strict=True)
        return tuple(self.updates([weight], [gradient])[0] for weight, gradient in pairs)


def _compare(trial: _Trial, device: torch.device) -> Scope:
    """Return how far an optimizer looks in matrices of the first shape that shows it."""
    for shape in SHAPES:
        matrices = _matrices(shape, device)
        alone = trial.apart(matrices[:2], matrices[2:])
        if not alone[0].any():  # it shows nothing
            return Scope.UNKNOWN
        if _parts_differ(trial, matrices, alone[0]):
            together = trial.updates(matrices[:2], matrices[2:])
            alike = all(map(_close, together, alone))
            return Scope.PARAMETER if alike else Scope.OTHERS
    return Scope.ELEMENT


def _parts_differ(trial: _Trial, matrices: Halves, whole: Tensor) -> bool:
    """Return whether halves of the first matrix get another update than the whole of it."""
    weight, _, gradient, _ = matrices
    for dim in range(2):
        parts = torch.cat(trial.apart(_cut(weight, dim), _cut(gradient, dim)), dim)
        if not _close(parts, whole):
            return True
    return False


def _matrices(shape: tuple[int, int], device: torch.device) -> Halves:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for _ in range(4))
    # Rows of other sizes, so that the norms of parts differ by far.
    rows, columns = (torch.linspace(0.1, 2.0, size) for size in shape)
    return tuple((each * rows[:, None] * columns).to(device) for each in drawn)


def _cut(matrix: Tensor, dim: int) -> list[Tensor]:
    at = SHAPES[matrix.shape[0], matrix.shape[1]][dim]
    return [part.contiguous() for part in matrix.split([at, matrix.shape[dim] - at], dim)]


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two updates are one; what is not finite is none."""
    gap = float(torch.linalg.vector_norm(one.double() - other.double()))
    return gap <= EXACT * float(torch.linalg.vector_norm(other.double()))

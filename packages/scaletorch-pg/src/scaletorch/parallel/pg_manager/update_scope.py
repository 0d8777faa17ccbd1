"""The elements that an optimizer's update depends on, found by a trial on two small matrices.

An element-wise update is the same on the shards of a matrix as on the full matrix. An update that
uses norms, rows or blocks is not. The trial uses a new optimizer of the same class and settings,
so it changes nothing in the program.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = 3  # step 2 shows the state that step 1 left; step 3, how step 2 changed it
# Shape -> cut positions. Most shards are 128 or longer; some optimizers do not factor smaller ones.
# The first shape fits no blocks; the second and its shards are whole blocks, as torchao needs.
SHAPES = {(259, 263): (127, 130), (256, 384): (128, 192)}
LEARNING_RATE = 0.1
EXACT = 1e-5  # relative rounding error of float32 between equal updates

# Results by class, step, device and settings, since several callers ask.
_TRIED: dict[tuple[object, ...], Scope] = {}

Halves = tuple[Tensor, ...]


class Scope(IntEnum):
    """The elements that the update of one depends on, apart from the step and the settings."""

    ELEMENT = 0
    PARAMETER = 1
    OTHERS = 2
    UNKNOWN = 3

    @property
    def words(self) -> str:
        """Description for messages."""
        return _WORDS[self]


_WORDS = {
    Scope.ELEMENT: "treats every element alike",
    Scope.PARAMETER: "looks at whole parameters",
    Scope.OTHERS: "looks at several parameters at once, or draws at random",
    Scope.UNKNOWN: "cannot be tried on a matrix of its own (its step takes a closure, its "
    "gradients must be sparse, or its constructor takes what its groups do not have), so that "
    "nobody knows what it looks at",
}


# torch's own optimizers need no trial.
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
    """Return whether this is one of torch's own element-wise optimizers."""
    return _SCOPES.get(type(optimizer)) is Scope.ELEMENT


def update_scope(optimizer: Optimizer) -> Scope:
    """Return the scope of an optimizer's update: the widest over its parameter groups.

    Args:
        optimizer: Any optimizer. A new one of its class is tried on the device of its first
            parameter; random generators are restored.
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
    """Return the scope of an optimizer's updates with the settings of one group."""
    kind, defaults = type(optimizer), optimizer.defaults
    key = kind, kind.step, device, repr(defaults), repr(group)
    if key not in _TRIED:
        try:
            _TRIED[key] = _compare(_Trial(kind, defaults, group), device)
        except Exception:  # third-party code: it cannot be created or takes no matrix
            _TRIED[key] = Scope.UNKNOWN
    return _TRIED[key]


class _Trial:
    """Creates optimizers with the settings of an existing one and returns their updates.

    Args:
        kind: The optimizer class.
        defaults: The `defaults` of the existing optimizer.
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
        """Return the sum of the updates of `STEPS` steps for each matrix, from one optimizer."""
        parameters = [torch.nn.Parameter(each.clone()) for each in weights]
        optimizer = self._kind([{**self._group, "params": parameters}], **self._arguments)
        start = getattr(optimizer, "train", None)
        if callable(start):  # schedule-free optimizers need it
            start()
        # Bypass step hooks: they belong to the program, and one of them calls this trial.
        step = getattr(self._kind.step, "__wrapped__", self._kind.step)
        for number in range(STEPS):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                # A new gradient at every step, computed element by element.
                parameter.grad = gradient * torch.cos(number * gradient)
            step(optimizer)
        found = zip(parameters, weights, strict=True)
        return tuple(parameter.detach() - before for parameter, before in found)

    def apart(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Halves:
        """Return the updates of a separate optimizer for each matrix."""
        pairs = zip(weights, gradients, strict=True)
        return tuple(self.updates([weight], [gradient])[0] for weight, gradient in pairs)


def _compare(trial: _Trial, device: torch.device) -> Scope:
    """Return the scope of an optimizer, trying shapes until one shows more than `ELEMENT`."""
    for shape in SHAPES:
        matrices = _matrices(shape, device)
        alone = trial.apart(matrices[:2], matrices[2:])
        if not alone[0].any():  # no update: the trial shows nothing
            return Scope.UNKNOWN
        if _parts_differ(trial, matrices, alone[0]):
            together = trial.updates(matrices[:2], matrices[2:])
            alike = all(map(_close, together, alone))
            return Scope.PARAMETER if alike else Scope.OTHERS
    return Scope.ELEMENT


def _parts_differ(trial: _Trial, matrices: Halves, whole: Tensor) -> bool:
    """Return whether the two halves of the first matrix get another update than the full one."""
    weight, _, gradient, _ = matrices
    for dim in range(2):
        parts = torch.cat(trial.apart(_cut(weight, dim), _cut(gradient, dim)), dim)
        if not _close(parts, whole):
            return True
    return False


def _matrices(shape: tuple[int, int], device: torch.device) -> Halves:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for _ in range(4))
    # Scale rows and columns, so that the norms of halves differ clearly.
    rows, columns = (torch.linspace(0.1, 2.0, size) for size in shape)
    return tuple((each * rows[:, None] * columns).to(device) for each in drawn)


def _cut(matrix: Tensor, dim: int) -> list[Tensor]:
    at = SHAPES[matrix.shape[0], matrix.shape[1]][dim]
    return [part.contiguous() for part in matrix.split([at, matrix.shape[dim] - at], dim)]


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two updates are equal up to rounding; False if any is not finite."""
    gap = float(torch.linalg.vector_norm(one.double() - other.double()))
    return gap <= EXACT * float(torch.linalg.vector_norm(other.double()))

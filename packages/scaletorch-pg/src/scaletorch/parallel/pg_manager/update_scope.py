"""The elements that an optimizer's update depends on, found by a trial on two small matrices.

An element-wise update is the same on the shards of a matrix as on the full matrix. An update that
uses norms, rows or blocks is not. The trial uses a new optimizer of the same class and settings,
so it changes nothing in the program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

STEPS = 3  # step 2 shows the state that step 1 left; step 3, how step 2 changed it
# Shape -> cut positions. Most shards are 128 or longer; some optimizers do not factor smaller ones.
# The first shape fits no blocks; the second and its shards are whole blocks, as torchao needs.
SHAPES = {(259, 263): (127, 130), (256, 384): (128, 192)}
LEARNING_RATE = 0.1
EXACT = 1e-5  # relative rounding error of float32 between equal updates

# Results by class, step, device and settings, since several callers ask.
_TRIED: dict[tuple[object, ...], Scope] = {}


class Scope(IntEnum):
    """The elements that the update of one element depends on."""

    ELEMENT = 0
    PARAMETER = 1
    OTHERS = 2
    UNKNOWN = 3

    @property
    def words(self) -> str:
        """Description for messages."""
        return {
            Scope.ELEMENT: "treats every element alike",
            Scope.PARAMETER: "looks at whole parameters",
            Scope.OTHERS: "looks at several parameters at once, or draws at random",
            Scope.UNKNOWN: "cannot be tried on a matrix of its own (its step takes a closure, its "
            "gradients must be sparse, or its constructor takes what its groups do not have), so "
            "what its update depends on is unknown",
        }[self]


# torch's own optimizers need no trial.
_SCOPES: dict[type[Optimizer], Scope] = {
    **dict.fromkeys(
        (optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
         optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
        Scope.ELEMENT,
    ),
    **dict.fromkeys((optim.Adafactor, optim.Muon), Scope.PARAMETER),
}  # fmt: skip


def known_elementwise(optimizer: Optimizer) -> bool:
    """Return whether this is one of torch's own element-wise optimizers."""
    return _SCOPES.get(type(optimizer)) is Scope.ELEMENT


def update_scope(optimizer: Optimizer) -> Scope:
    """Return the scope of an optimizer's update: the widest over its parameter groups.

    A new optimizer is tried on the device of its first parameter; generators are restored.
    """
    known = _SCOPES.get(type(optimizer))
    if known is not None:
        return known
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    generators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=generators, device_type=device.type):
        return max((_try(optimizer, group, device) for group in groups), default=Scope.ELEMENT)


def _try(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> Scope:
    """Return the scope of an optimizer's updates with the settings of one group."""
    kind, defaults = type(optimizer), optimizer.defaults
    key = kind, kind.step, device, repr(defaults), repr(group)
    if key not in _TRIED:
        rate = group.get("lr")
        if isinstance(rate, float | int):
            group = {**group, "lr": LEARNING_RATE}  # a schedule may begin at zero
        elif isinstance(rate, Tensor):
            group = {**group, "lr": torch.full_like(rate, LEARNING_RATE)}
        try:
            _TRIED[key] = _compare(partial(_updates, kind, {**defaults, **group}, group), device)
        except Exception:  # third-party code: it cannot be created or takes no matrix
            _TRIED[key] = Scope.UNKNOWN
    return _TRIED[key]


def _updates(
    kind: type[Optimizer],
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Return the sum of the updates of `STEPS` steps for each matrix, from one new optimizer."""
    taken = inspect.signature(kind).parameters.keys() - {"params"}
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    arguments = {key: value for key, value in settings.items() if key in taken}
    optimizer = kind([{**group, "params": parameters}], **arguments)
    start = getattr(optimizer, "train", None)
    if callable(start):  # schedule-free optimizers need it
        start()
    # Bypass step hooks: they belong to the program, and one of them calls this trial.
    step = getattr(kind.step, "__wrapped__", kind.step)
    for number in range(STEPS):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # A new gradient at every step, computed element by element.
            parameter.grad = gradient * torch.cos(number * gradient)
        step(optimizer)
    return [p.detach() - weight for p, weight in zip(parameters, weights, strict=True)]


def _compare(updates: Callable[..., list[Tensor]], device: torch.device) -> Scope:
    """Return the scope of an optimizer, trying shapes until one shows more than `ELEMENT`."""
    for shape, cuts in SHAPES.items():
        matrices = _matrices(shape, device)
        weights, gradients = matrices[:2], matrices[2:]
        separate = [updates([w], [g])[0] for w, g in zip(weights, gradients, strict=True)]
        if not separate[0].any():  # no update: the trial shows nothing
            return Scope.UNKNOWN
        for dim in range(2):  # do two halves of a matrix get another update than the full one?
            halves = (x.tensor_split([cuts[dim]], dim) for x in (weights[0], gradients[0]))
            joined = [updates([w], [g])[0] for w, g in zip(*halves, strict=True)]
            if not _close(torch.cat(joined, dim), separate[0]):
                together = updates(weights, gradients)
                alike = all(map(_close, together, separate))
                return Scope.PARAMETER if alike else Scope.OTHERS
    return Scope.ELEMENT


def _matrices(shape: tuple[int, int], device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for _ in range(4))
    # Scale rows and columns, so that the norms of halves differ clearly.
    rows, columns = (torch.linspace(0.1, 2.0, size) for size in shape)
    return [(matrix * rows[:, None] * columns).to(device) for matrix in drawn]


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two updates are equal up to rounding; False if any is not finite."""
    gap = float(torch.linalg.vector_norm(one.double() - other.double()))
    return gap <= EXACT * float(torch.linalg.vector_norm(other.double()))

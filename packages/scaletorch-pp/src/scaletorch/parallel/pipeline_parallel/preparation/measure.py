"""The costs of the layers of a plain model: measured times, to balance stages with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.devices import synchronize
from ....dist.errors import InvalidArgumentError
from ...pg_manager import token_loss_sum
from ...pg_manager.building import divided_modules
from ..runtime.forms import tensor_of
from ..splitting.split import Split, parts_of
from ..steps.loss import Batch, LossFunction


def measure_costs(
    model: nn.Module,
    batch: Batch,
    split: Split | None = None,
    *,
    loss_fn: LossFunction | None = None,
    repeats: int = 5,
) -> tuple[float, ...]:
    """Time forward and backward of each layer, and of all before and after them.

    The whole plain model runs on one process (of experts, those that the batch's tokens choose), on
    the device on which it is; on others than CPU each layer is waited for. All of the time is
    counted: that of the model's own code between layers belongs to the layer before, that of the
    loss to all after the layers. Parameters, gradients, buffers, random states are as before.

    No two measurements are equal, and all ranks must be given the same split: measure on one rank
    (`broadcast_object_list` gives the others its numbers), or once and for all.

    Args:
        model: A plain module, not yet cut.
        batch: A micro-batch as in training: `input_ids` is the forward's first argument,
            `labels` is for the loss, all else is given by keyword.
        split: Tells the layers; None infers them.
        loss_fn: `loss_fn(output, batch)`; None is the cross entropy of `labels`, or a plain sum
            of the output if there are none.
        repeats: Runs of which each part's median is taken, after one that warms up.

    Returns:
        Seconds of all before the layers, of each layer, and of all after them, as
        `Split(costs=...)` takes them.

    Raises:
        InvalidArgumentError: Layers that cannot be told or are not called once each in their order,
            a model on the meta device or with experts divided over ranks, or a number of repeats
            below 1.

    Example:
        >>> costs = measure_costs(model, micro_batches[0])
        >>> PipelineParallel(model, Split(costs=costs))
    """
    if repeats < 1:
        raise InvalidArgumentError(f"repeats must be 1 at least, got {repeats}")
    _, *parts, _ = parts_of(model, split)
    layers = [model.get_submodule(first) for first, *_ in parts]
    if divided_modules(model):
        raise InvalidArgumentError(
            "measure_costs runs the model on one process, and the experts of this one are divided "
            "over ranks: measure the plain model, before anything is divided"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidArgumentError(
            "measure_costs runs the model, and parameters of it are on the meta device; build it "
            "on a real one"
        )
    with _unchanged(model), torch.enable_grad():
        end = model.get_submodule(parts[-1][-1])
        runs = [
            _run(model, layers, end, batch, loss_fn or _default_loss) for _ in range(1 + repeats)
        ]
    return tuple(median(part) for part in zip(*runs[1:], strict=True))


@dataclass(slots=True)
class _Marks:
    """When one forward and backward reached each layer.

    Attributes:
        device: Device of the model.
        num_layers: Number of layers.
        called: The layers that were entered, in order.
        entered: Time at which each was.
        left: Time at which the last one was left.
        ready: Time at which the gradient was there, of a layer's input or the last one's output.
    """

    device: torch.device
    num_layers: int
    called: list[nn.Module] = field(default_factory=list)
    entered: list[float] = field(default_factory=list)
    left: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watch(tensor_of(args or kwargs), len(self.entered))
        self.called.append(module)
        self.entered.append(_now(self.device))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._watch(tensor_of(output), self.num_layers)
        self.left = _now(self.device)

    def _watch(self, tensor: Tensor, place: int) -> None:
        if tensor.requires_grad:  # not so where everything up to here is frozen
            tensor.register_hook(lambda _: self.ready.__setitem__(place, _now(self.device)))


def _run(
    model: nn.Module,
    layers: Sequence[nn.Module],
    end: nn.Module,
    batch: Batch,
    loss_fn: LossFunction,
) -> list[float]:
    """Return each part's seconds in one forward and backward.

    Args:
        model: The model.
        layers: Of each layer the module that is called first.
        end: The one that is called last, of all layers.
        batch: A micro-batch.
        loss_fn: Its loss.
    """
    marks = _Marks(_device(model), len(layers))
    began = _now(marks.device)
    with _marking(layers, end, marks):
        loss = loss_fn(_forward(model, batch), batch)
    turned = _now(marks.device)
    _check_order(marks.called, layers)
    if loss.requires_grad:
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)  # leaves .grad alone
    back = [_now(marks.device)]
    for place in range(len(layers) + 1):
        back.append(marks.ready.get(place, back[-1]))
    forward = [
        later - earlier for earlier, later in pairwise([began, *marks.entered, marks.left, turned])
    ]
    backward = [later - earlier for later, earlier in pairwise([*back, turned])]
    return [sum(both) for both in zip(forward, backward, strict=True)]


@contextmanager
def _marking(layers: Sequence[nn.Module], end: nn.Module, marks: _Marks) -> Iterator[None]:
    """Mark the layers' calls; not for longer, as backward may enter layers that it recomputes."""
    hooks = [
        layer.register_forward_pre_hook(marks.enter, prepend=True, with_kwargs=True)
        for layer in dict.fromkeys(layers)
    ]
    hooks.append(end.register_forward_hook(marks.leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers and random states back in the end."""
    device = _device(model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    own = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(own, device_type=device.type if own else "cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _forward(model: nn.Module, batch: Batch) -> Any:
    device = _device(model)
    given = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
    first = [given["input_ids"]] if "input_ids" in given else []
    return model(*first, **{n: v for n, v in given.items() if n not in ("input_ids", "labels")})


def _default_loss(output: Any, batch: Batch) -> Tensor:
    result = tensor_of(output)
    if "labels" in batch:
        return token_loss_sum(result, batch["labels"].to(result.device))
    return result.sum()


def _check_order(called: Sequence[nn.Module], layers: Sequence[nn.Module]) -> None:
    if list(called) != list(layers):
        places = {layer: index for index, layer in enumerate(layers)}
        raise InvalidArgumentError(
            f"expected forward to call each of the {len(layers)} layers once, in their order; it "
            f"called {[places[layer] for layer in called]}. A pipeline cannot be cut there"
        )


def _device(model: nn.Module) -> torch.device:
    return next(chain(model.parameters(), model.buffers(), [torch.empty(0)])).device


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()

"""Forwards of a pipeline without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..runtime.forms import tensor_of
from ..schedules.builders import Builder, forward_only
from ..schedules.tasks import Task
from .step import Batch, Step


@torch.no_grad()
def pipeline_forward(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    group: ProcessGroup | None = None,
    each: Callable[[Any, Batch], Tensor] | None = None,
) -> list[Tensor]:
    """Run micro-batches forward through the stages, without gradients.

    The model's mode does not change: call `model.eval()` before if it matters.

    Args:
        model: A `PipelineParallel`, or wrappers around one; the outermost is called.
        data_loader: Micro-batches with `input_ids`; `labels` are not needed.
        tensor_shapes: Shape of one micro-batch's hidden states, [B, L, H]; None takes any.
        device: Device on which the stage computes; None is the device of its parameters.
        dtype: Dtype of hidden states; None takes any.
        group: The ranks in order; None is the model's own group.
        each: A function of output and batch; its result, such as a loss, is returned in place of
            the output. None returns the output's logits [B, L, V], or its first tensor.

    Returns:
        One tensor for each micro-batch, on the rank of the last stage; an empty list on others.

    Raises:
        InvalidArgumentError: A bad argument, or a stage's output of another shape, dtype or device
            than announced.
        MismatchError: Ranks differ in micro-batches or their shapes.
        StageError: Another rank has failed; the message has its error.
    """
    step = Step(model, data_loader, tensor_shapes, device, dtype, group)
    forwards = _forwards(step.pipeline.all_stages)
    step.agree("these forwards", forwards, with_labels=False, trains=False)
    outputs: dict[int, Tensor] = {}

    def perform(task: Task) -> None:
        _, output = step.forward(task)
        if task.makes is None:
            number = task.action.micro_batch
            batch = step.inputs.batches[number]
            outputs[number] = tensor_of(output) if each is None else each(output, batch)

    step.execute(perform)
    return [outputs[micro_batch] for micro_batch in sorted(outputs)]


@lru_cache(maxsize=64)
def _forwards(stages: tuple[tuple[int, ...], ...]) -> Builder:
    """Return the same function object for the same stages, so that `plan_of` caches its plan."""
    return partial(forward_only, stages=stages)

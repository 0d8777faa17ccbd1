"""The documented module of pipeline parallelism: the wrapper and its two training steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .stages.stage import PipelineParallel
from .steps.loss import Batch, LossFunction
from .steps.step import StepArguments, train_step

__all__ = [
    "PipelineParallel",
    "train_step_pipeline",
    "train_step_pipeline_1f1b",
    "train_step_pipeline_afab",
]


def train_step_pipeline(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches in the order of the model's own schedule.

    Gradients are added to `.grad` and complete on return: the last backward syncs those of a data
    parallel wrapper, and tied parameters are summed over their ranks. If a stage raises, on
    whichever rank, all ranks raise, and the model may be used again; its gradients are half made.

    Args:
        model: A `PipelineParallel`, or wrappers around one (`.module`); the outermost is called.
        data_loader: This step's micro-batches, as many on every rank: mappings with `input_ids`
            and `labels` [B, L] int64, and more that forward is given by keyword on every stage.
            Sizes may differ from one to the next.
        tensor_shapes: Shape of one micro-batch's hidden states, [B, L, H], to be checked; None
            takes whatever shape they have.
        device: Device on which the stage computes; None is that of its parameters.
        dtype: Dtype of hidden states, to be checked, or cast to under autocast; None takes any.
        loss_fn: `loss_fn(output, batch) -> scalar`, added up over micro-batches. None is the
            token cross entropy of `labels` (aligned with the outputs, -100 ignored) divided by
            the valid tokens of all micro-batches and, if the pipeline is the manager's pp axis, of
            the manager's CP x DP group. Over a group of your own it counts this pipeline's alone.
        group: The ranks in order; None is the model's own group.

    Returns:
        The sum of the micro-batches' losses on the rank of the last stage and zero elsewhere: 0-d,
        detached, in `dtype` or the parameters' but float32 at least. With the default loss it is
        this rank's share of the global batch's loss.

    Raises:
        InvalidArgumentError: A bad argument, or a stage's output that was announced otherwise.
        MismatchError: Ranks that differ in micro-batches, their shapes, or schedule.
        ScheduleError: A schedule that would not end, or not compute every gradient.
        StageError: Another rank has failed in this step; the message has its error.
    """
    arguments = StepArguments(model, data_loader, tensor_shapes, device, dtype, group)
    return train_step(arguments, loss_fn, None)


def train_step_pipeline_afab(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches, all forwards first, then all backwards.

    Arguments, result and errors are those of `train_step_pipeline`; the model has one stage on each
    rank. Activations of all micro-batches are alive at once.
    """
    arguments = StepArguments(model, data_loader, tensor_shapes, device, dtype, group)
    return train_step(arguments, loss_fn, "afab")


def train_step_pipeline_1f1b(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches, forwards and backwards in turn.

    Arguments, result and errors are those of `train_step_pipeline`; the model has one stage on each
    rank. Stage s of N keeps the activations of at most N - s micro-batches.
    """
    arguments = StepArguments(model, data_loader, tensor_shapes, device, dtype, group)
    return train_step(arguments, loss_fn, "1f1b")

"""The documented module of pipeline parallelism: the wrapper and its two training steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .loss import Batch, LossFunction
from .stage import PipelineParallel
from .step import train_step

__all__ = ["PipelineParallel", "train_step_pipeline_1f1b", "train_step_pipeline_afab"]


def train_step_pipeline_afab(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches, all forwards first, then all backwards.

    Arguments, result and errors are those of `train_step_pipeline_1f1b`. Activations of all
    micro-batches are alive at once.
    """
    return train_step("afab", model, data_loader, tensor_shapes, device, dtype, loss_fn, group)


def train_step_pipeline_1f1b(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run one step's micro-batches, forwards and backwards in turn.

    Gradients are added to ``.grad`` and complete on return: the last backward syncs those of a data
    parallel wrapper, and tied parameters are summed over their stages.

    Args:
        model: a `PipelineParallel`, or wrappers around one (``.module``); the outermost is called.
        data_loader: this step's micro-batches, as many on every stage: mappings with ``input_ids``
            and ``labels`` [B, L] int64, and more that forward is given by keyword on every stage.
        tensor_shapes: shape of one micro-batch's hidden states, [B, L, H].
        device: where the stage computes.
        dtype: dtype in which hidden states travel, usually that of the parameters.
        loss_fn: ``loss_fn(output, batch) -> scalar``, added up over micro-batches. None is the
            token cross entropy of ``labels`` (aligned with the outputs, -100 ignored) divided by
            the valid tokens of all micro-batches and of the manager's CP x DP group.
        group: the stages in order; None is the model's own group.

    Returns:
        The sum of the micro-batches' losses on the last stage and zero elsewhere: 0-d, detached, in
        ``dtype`` but float32 at least. With the default loss it is this rank's share of the global
        batch's loss.

    Raises:
        InvalidArgumentError: a bad argument, or a stage's output that the next does not expect.
        MismatchError: stages that differ in micro-batches, shape, dtype or schedule.
    """
    return train_step("1f1b", model, data_loader, tensor_shapes, device, dtype, loss_fn, group)

"""Forwards alone: a model's outputs from the stages of its pipeline, without labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import all_gather_object, broadcast
from .hidden import tensor_of
from .loss import Batch
from .runtime import execute
from .schedules import forward_only
from .stage import PipelineParallel
from .step import agreed_batches, unwrap
from .transfers import derive
from .wire import Wire
from .work import entries_of


@dataclass(slots=True)
class ForwardWork:
    """What the actions of a schedule of forwards do.

    Attributes:
        model: the outermost module.
        batches: the micro-batches.
        wire: the form of the hidden states.
        last: whether this stage's outputs are the model's.
        outputs: what the last stage returned, by micro-batch.
    """

    model: nn.Module
    batches: list[Batch]
    wire: Wire
    last: bool
    outputs: list[Tensor] = field(default_factory=list)

    def forward(self, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Run the stage on one micro-batch; keep what the last stage returns."""
        first, entries = entries_of(self.batches[micro_batch], hidden, self.wire.device)
        output = tensor_of(self.model(first, **entries))
        if not self.last:
            return self.wire.checked(output)
        self.outputs.append(output)
        return output


@torch.no_grad()
def pipeline_forward(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    everywhere: bool = False,
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    """Run micro-batches forward through the stages, without gradients.

    The model's mode is left as it is: call ``model.eval()`` before, where it matters.

    Args:
        model: a `PipelineParallel`, or wrappers around one; the outermost is called.
        data_loader: micro-batches with ``input_ids``; ``labels`` are not needed.
        tensor_shapes: shape of one micro-batch's hidden states, [B, L, H].
        device: where the stage computes.
        dtype: dtype in which hidden states travel.
        everywhere: return the outputs on every stage, not on the last alone.
        group: the stages in order; None is the model's own group.

    Returns:
        The model's output (its first tensor, such as logits [B, L, V]) for each micro-batch, on the
        last stage; nothing elsewhere unless ``everywhere``.

    Raises:
        InvalidArgumentError: a bad argument, or a stage's output that the next does not expect.
        MismatchError: stages that differ in micro-batches, shape or dtype.
    """
    _, pipeline = unwrap(model)
    batches, wire = agreed_batches(
        "these forwards", "forward_only", pipeline, data_loader, tensor_shapes, device, dtype,
        group, with_labels=False,
    )  # fmt: skip
    work = ForwardWork(model, batches, wire, pipeline.is_last_stage)
    actions = forward_only(pipeline.num_stages, len(batches)).ranks[pipeline.stage]
    execute(derive(actions, pipeline.stage, pipeline.num_stages), wire, work.forward)
    return _shared(work.outputs, pipeline, wire) if everywhere else work.outputs


def _shared(outputs: list[Tensor], pipeline: PipelineParallel, wire: Wire) -> list[Tensor]:
    """Return the last stage's outputs on every stage."""
    forms = all_gather_object([(output.shape, output.dtype) for output in outputs], wire.group)[-1]
    if not pipeline.is_last_stage:
        outputs = [torch.empty(*form[:1], dtype=form[1], device=wire.device) for form in forms]
    for output in outputs:
        broadcast(output, wire.ranks[-1], wire.group)
    return outputs

"""One step of a pipeline: the agreement of all ranks, this rank's forwards, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_comm_device, group_ranks
from ....dist.building import agree, tell_guard
from ....dist.errors import InvalidArgumentError, ScaletorchError, StateError
from ...pg_manager import describe_rank
from ..runtime.execute import Plan, execute, plan_of
from ..runtime.forms import Hidden, tensor_of
from ..runtime.mail import Mail, Posts
from ..schedules.builders import AnySchedule, Builder, forward_only
from ..schedules.schedule import FORWARD, Schedule
from ..schedules.tasks import Task
from ..stages.stage import PipelineParallel
from .batches import Batch, MicroBatches, checked_dtype, checked_shape, read


class Step:
    """One step on this rank; `agree` sets `inputs`, `plan` and `mail`.

    The arguments are those of `train_step_pipeline`.

    Attributes:
        model: The outermost module: its forward and backward are called.
        wrappers: The modules around the pipeline, outermost first.
        pipeline: The rank's stages.
        group: The pipeline's ranks.
        inputs: The micro-batches.
        plan: The schedule, and this rank's program.
        mail: Outputs on their way between stages.
    """

    inputs: MicroBatches
    plan: Plan
    mail: Mail

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Batch],
        tensor_shapes: Sequence[int] | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        group: ProcessGroup | None,
    ) -> None:
        self.model = model
        self.wrappers, self.pipeline = unwrap(model)
        self.group = _same_ranks(self.pipeline, group)
        self._given = data_loader, tensor_shapes, device, dtype

    def agree(
        self,
        subject: str,
        schedule: AnySchedule | None,
        *,
        with_labels: bool,
        trains: bool,
    ) -> None:
        """Read the micro-batches, check the schedule, and compare both over the pipeline's ranks.

        Args:
            subject: Name of the step, for messages.
            schedule: The schedule; None is the pipeline's own.
            with_labels: Whether micro-batches need labels.
            trains: Whether the step runs backwards.
        """
        pipeline, lines = self.pipeline, list[str]()
        failed: list[Exception] = []
        try:
            self.inputs = self._inputs(with_labels)
            chosen = pipeline.schedule if schedule is None else schedule
            count = len(self.inputs.batches)
            self.plan = plan_of(chosen, len(pipeline.ranks), count, pipeline.rank)
            _require_stages(self.plan.schedule, pipeline)
            pipeline.check_ties()
            if trains:
                self._require_training(self.plan.schedule)
            lines = [*self.inputs.describe(), self.plan.text]
        except Exception as found:  # a data loader may raise anything, and other ranks must know
            failed.append(found)
            if not isinstance(found, ScaletorchError) and tell_guard(found):
                raise
        runtime = pipeline.runtime
        note = runtime.note_parameters(pipeline)
        # Popped, since the error's traceback refers to this frame, and so to the list.
        notes = agree(subject, lines, self.group, error=failed.pop() if failed else None, note=note)
        runtime.compare_parameters(notes)
        posts = Posts(pipeline.ranks, self.group, self.inputs.device)
        self.mail = Mail(posts, self.inputs.signatures, runtime.forms)

    def forward(self, task: Task) -> tuple[Hidden | None, Any]:
        """Run a stage on a micro-batch; return the hidden states it received, and its output.

        Unless it is the last stage, the output goes to the next one.
        """
        hidden = None if task.needs is None else self.mail.take_hidden(task.needs)
        self.pipeline.select(task.action.chunk)
        first, entries = self.inputs.inputs(task.action.micro_batch, hidden)
        runtime = self.pipeline.runtime
        runtime.ids, runtime.in_step = self.inputs.ids(task.action.micro_batch), True
        try:
            output = self.model(first, **entries)
        finally:
            runtime.ids, runtime.in_step = None, False
        if task.makes is not None:
            output = self.inputs.checked(output)
            self.mail.put(task.makes, output)
        return hidden, output

    def execute(
        self, perform: Callable[[Task], None], note: Callable[[], bool] = lambda: False
    ) -> bool:
        """Execute this rank's program; return whether `note` returned true on any rank."""

        def run(task: Task) -> None:
            with torch.profiler.record_function(f"{task.action} of stage {task.stage}"):
                perform(task)

        try:
            return execute(self.plan.program, self.mail, run, self.group, note)
        finally:
            self.pipeline.select_all()

    def _inputs(self, with_labels: bool) -> MicroBatches:
        data_loader, shape, device, dtype = self._given
        if device is None:  # a stage without parameters takes the group's device
            first = next(self.pipeline.parameters(), None)
            device = get_comm_device(self.pipeline.group) if first is None else first.device
        return MicroBatches(
            read(data_loader, with_labels=with_labels),
            torch.device(device),
            None if shape is None else checked_shape(shape),
            None if dtype is None else checked_dtype(dtype),
        )

    def _require_training(self, schedule: Schedule) -> None:
        if not torch.is_grad_enabled():
            raise StateError(
                f"{describe_rank()}: a train step needs gradients; leave torch.no_grad(), or call "
                "pipeline_forward for outputs alone"
            )
        if all(action.kind == FORWARD for rank in schedule.ranks for action in rank):
            raise InvalidArgumentError(
                f"schedule {schedule.name!r} has no backward: no gradient would be computed; call "
                "pipeline_forward, or choose another schedule"
            )
        for wrapper in self.wrappers:
            if not callable(getattr(wrapper, "backward", None)):
                raise InvalidArgumentError(
                    f"{describe_rank()}: {type(wrapper).__name__} around a PipelineParallel must "
                    "have backward(input_tensor, output_tensor, output_tensor_grad), as "
                    "DataParallelBucket has; torch's DistributedDataParallel has none"
                )


def unwrap(model: nn.Module) -> tuple[list[nn.Module], PipelineParallel]:
    """Return the wrappers around a `PipelineParallel`, outermost first, and the pipeline itself."""
    wrappers: list[nn.Module] = []
    inner: Any = model
    while not isinstance(inner, PipelineParallel):
        if not isinstance(inner, nn.Module):
            raise InvalidArgumentError(
                f"{describe_rank()}: expected a PipelineParallel, or wrappers around one that hold "
                f"it as .module, got {type(model).__name__}; wrap the model in PipelineParallel"
            )
        wrappers.append(inner)
        inner = getattr(inner, "module", None)
    return wrappers, inner


def _require_stages(schedule: Schedule, pipeline: PipelineParallel) -> None:
    if schedule.stages != pipeline.all_stages:
        raise InvalidArgumentError(
            f"{describe_rank()}: schedule {schedule.name!r} has stages {schedule.stages} on its "
            f"ranks, and this model was split into {pipeline.all_stages}; pass the schedule to "
            "PipelineParallel(model, schedule=...) and call train_step_pipeline"
        )


def _same_ranks(pipeline: PipelineParallel, group: ProcessGroup | None) -> ProcessGroup | None:
    if group is None:
        return pipeline.group
    if group_ranks(group) != pipeline.ranks:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model's stages are ranks {pipeline.ranks} and the group "
            f"given has ranks {group_ranks(group)}; pass one group to both, or to the model alone"
        )
    return group


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

"""One train step: agree on it, prove its schedule, execute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import get_comm_device, group_ranks
from ....dist.building import agree, tell_guard
from ....dist.errors import InvalidArgumentError, ScaletorchError, StateError
from ...pg_manager import describe_rank
from ..runtime.execute import execute
from ..runtime.mail import Mail
from ..runtime.posts import Posts
from ..runtime.program import Plan, Task, plan_of
from ..schedules.builders import AnySchedule
from ..schedules.schedule import FORWARD, Schedule
from ..stages.stage import PipelineParallel
from .batches import (
    Batch,
    LossFunction,
    MicroBatches,
    checked_dtype,
    checked_shape,
    read,
    token_mean_loss,
)
from .work import Stages, Training, deferred_sync, unwrap


class StepArguments(NamedTuple):
    """The arguments of a train step; see `train_step_pipeline`."""

    model: nn.Module
    data_loader: Iterable[Batch]
    tensor_shapes: Sequence[int] | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    group: ProcessGroup | None


def train_step_pipeline(
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    loss_fn: LossFunction | None = None,
    group: ProcessGroup | None = None,
    schedule: AnySchedule | None = None,
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
        schedule: Another schedule of the same stages; None is the model's own.

    Returns:
        The sum of the micro-batches' losses on the rank of the last stage and zero elsewhere: 0-d,
        detached, in the losses' dtype but float32 at least, on every rank. With the default loss it
        is this rank's share of the global batch's loss.

    Raises:
        InvalidArgumentError: A bad argument, or a stage's output that was announced otherwise.
        MismatchError: Ranks that differ in micro-batches, their shapes, or schedule.
        ScheduleError: A schedule that would not end, or not compute every gradient.
        StageError: Another rank has failed in this step; the message has its error.
    """
    arguments = StepArguments(model, data_loader, tensor_shapes, device, dtype, group)
    pipeline = unwrap(model)[1]
    with_labels = loss_fn is None and pipeline.is_last_stage
    plan, inputs = agreed_step(
        "this train step", arguments, schedule, with_labels=with_labels, require=_require_training
    )
    if with_labels:
        loss_fn = token_mean_loss(inputs.batches, inputs.device, _same_ranks(pipeline, group))
    return _train(arguments, plan, inputs, loss_fn)


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
    rest = tensor_shapes, device, dtype
    return train_step_pipeline(
        model, data_loader, *rest, loss_fn=loss_fn, group=group, schedule="afab"
    )


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
    rest = tensor_shapes, device, dtype
    return train_step_pipeline(
        model, data_loader, *rest, loss_fn=loss_fn, group=group, schedule="1f1b"
    )


def _train(
    arguments: StepArguments, plan: Plan, inputs: MicroBatches, loss_fn: LossFunction | None
) -> Tensor:
    """Execute a plan, complete the gradients, and return the loss."""
    wrappers, pipeline = unwrap(arguments.model)
    with deferred_sync(wrappers) as switches:
        if pipeline.ties:
            pipeline.runtime.tied.begin()
        stages = stages_of_step(arguments, inputs)
        training = Training(stages, loss_fn, switches, plan.schedule.ranks[pipeline.rank])
        wide = execute_plan(plan, stages, training.run, training.is_wide)
        if all(switches.values()):
            pipeline.sync_tied_gradients()
        else:  # the wrapper has not summed this step's gradients yet: a later step will
            pipeline.runtime.tied.postpone()
    return training.total.to(torch.float64 if wide else torch.float32)


def agreed_step(
    subject: str,
    arguments: StepArguments,
    schedule: AnySchedule | None,
    *,
    with_labels: bool,
    require: Callable[[nn.Module, Schedule], None] | None = None,
    facts: Iterable[str] = (),
) -> tuple[Plan, MicroBatches]:
    """Return the plan of a step and its input, compared over the ranks of the pipeline.

    Args:
        subject: Name of the step, for messages.
        arguments: The step's.
        schedule: The schedule; None is the pipeline's own.
        with_labels: Whether micro-batches need labels.
        require: Raises if a model and a schedule cannot be used for this.
        facts: Other facts that must be the same on all ranks.

    Raises:
        InvalidArgumentError: A bad argument.
        MismatchError: Ranks that differ, or another rank has a mistake.
    """
    pipeline = unwrap(arguments.model)[1]
    group = _same_ranks(pipeline, arguments.group)
    lines = list(facts)
    failed: list[Exception] = []
    try:
        inputs = _inputs(arguments, pipeline, with_labels=with_labels)
        chosen = pipeline.schedule if schedule is None else schedule
        plan = plan_of(chosen, len(pipeline.ranks), len(inputs.batches), pipeline.rank)
        _require_stages(plan.schedule, pipeline)
        pipeline.check_ties()
        if require is not None:
            require(arguments.model, plan.schedule)
        lines += [*inputs.describe(), plan.text]
    except Exception as found:  # a data loader may raise anything; the others must learn of it
        failed.append(found)
        if not isinstance(found, ScaletorchError) and tell_guard(found):
            raise
    runtime = pipeline.runtime
    note = runtime.note_parameters(pipeline)
    # Taken out of the list, since its traceback has this frame.
    notes = agree(subject, lines, group, error=failed.pop() if failed else None, note=note)
    runtime.compare_parameters(notes)
    return plan, inputs


def stages_of_step(arguments: StepArguments, inputs: MicroBatches) -> Stages:
    """Return this rank's stages with the mail of one step."""
    pipeline = unwrap(arguments.model)[1]
    group = _same_ranks(pipeline, arguments.group)
    posts = Posts(pipeline.ranks, group, inputs.device)
    mail = Mail(posts, inputs.signatures, pipeline.runtime.forms)
    return Stages(arguments.model, pipeline, inputs, mail, group)


def execute_plan(
    plan: Plan,
    stages: Stages,
    perform: Callable[[Task], None],
    note: Callable[[], bool] = lambda: False,
) -> bool:
    """Execute this rank's program; return whether `note` returned true on any rank then.

    Raises:
        StageError: Another rank has failed.
    """

    def run(task: Task) -> None:
        with torch.profiler.record_function(f"{task.action} of stage {task.stage}"):
            perform(task)

    try:
        return execute(plan.steps, stages.mail, run, stages.group, note)
    finally:
        stages.pipeline.select_all()


def _inputs(
    arguments: StepArguments, pipeline: PipelineParallel, *, with_labels: bool
) -> MicroBatches:
    _, data_loader, shape, device, dtype, _ = arguments
    if device is None:  # where the parameters are, but a stage may have none
        first = next(pipeline.parameters(), None)
        device = get_comm_device(pipeline.group) if first is None else first.device
    return MicroBatches(
        read(data_loader, with_labels=with_labels),
        torch.device(device),
        None if shape is None else checked_shape(shape),
        None if dtype is None else checked_dtype(dtype),
    )


def _require_training(model: nn.Module, schedule: Schedule) -> None:
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
    for wrapper in (model, *unwrap(model)[0]):
        if not callable(getattr(wrapper, "backward", None)):
            raise InvalidArgumentError(
                f"{describe_rank()}: {type(wrapper).__name__} around a PipelineParallel must have "
                "backward(input_tensor, output_tensor, output_tensor_grad), as DataParallelBucket "
                "has; torch's DistributedDataParallel has none"
            )


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

"""One training step: agree on it, derive the stage's steps from a schedule, execute them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import group_ranks
from ...dist.agreement import agree
from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import describe_rank
from .loss import Batch, LossFunction, token_mean_loss
from .runtime import execute
from .schedules import SCHEDULES, Schedule, check
from .stage import PipelineParallel
from .transfers import derive
from .wire import Wire, checked_dtype, checked_shape
from .work import SYNC_SWITCH, TrainWork


def train_step(
    schedule: str,
    model: nn.Module,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    loss_fn: LossFunction | None,
    group: ProcessGroup | None,
) -> Tensor:
    """Run one step with a schedule of `SCHEDULES`; see `train_step_pipeline_1f1b`."""
    wrappers, pipeline = unwrap(model)
    if not torch.is_grad_enabled():
        raise StateError(f"{describe_rank()}: a train step needs gradients; leave torch.no_grad()")
    batches, wire = agreed_batches(
        "this train step", schedule, pipeline, data_loader, tensor_shapes, device, dtype, group,
        with_labels=loss_fn is None and pipeline.is_last_stage,
    )  # fmt: skip
    if loss_fn is None and pipeline.is_last_stage:
        loss_fn = token_mean_loss(batches, wire.device)
    with deferred_sync(wrappers) as switches:
        work = TrainWork(model, batches, wire, pipeline.stage, loss_fn, switches)
        return _run(schedule, pipeline, work)


def agreed_batches(
    subject: str,
    schedule: str,
    pipeline: PipelineParallel,
    data_loader: Iterable[Batch],
    tensor_shapes: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    group: ProcessGroup | None,
    *,
    with_labels: bool,
) -> tuple[list[Batch], Wire]:
    """Return this step's micro-batches and the form of its messages, compared over the stages.

    Raises:
        InvalidArgumentError: a bad argument.
        MismatchError: stages that differ, or another stage has a mistake.
    """
    group = _same_stages(pipeline, group)
    shape: tuple[int, ...] = ()
    batches: list[Batch] = []
    error: Exception | None = None
    try:
        shape, dtype = checked_shape(tensor_shapes), checked_dtype(dtype)
        batches = list_batches(data_loader, with_labels=with_labels)
    except Exception as found:  # a data loader may raise anything; the others must learn of it
        error = found
    facts = [f"{len(batches)} micro-batches", f"hidden states {shape} of {dtype}", schedule]
    agree(subject, facts, group, error=error)
    return batches, Wire(shape, dtype, torch.device(device), pipeline.ranks, group)


def _run(name: str, pipeline: PipelineParallel, work: TrainWork) -> Tensor:
    schedule = _checked(name, pipeline.num_stages, len(work.batches))
    steps = derive(schedule.ranks[pipeline.stage], pipeline.stage, pipeline.num_stages)
    pipeline.set_earlier_gradients_aside()
    recorder = pipeline.recorder
    runs = recorder.watch(work, schedule) if recorder else work
    execute(steps, work.wire, runs.forward, runs.backward)
    if all(work.switches.values()):
        pipeline.sync_tied_gradients()
    else:  # the wrapper has not summed this step's gradients yet: a later step will
        pipeline.postpone_tied_gradients()
    return work.total


@lru_cache(maxsize=64)
def _checked(name: str, num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return a schedule that was proven to run to its end."""
    schedule = SCHEDULES[name](num_ranks, num_micro_batches)
    check(schedule)
    return schedule


def unwrap(model: nn.Module) -> tuple[list[nn.Module], PipelineParallel]:
    """Return the wrappers around a `PipelineParallel`, outermost first, and itself.

    Raises:
        InvalidArgumentError: there is none beneath ``model``.
    """
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


def list_batches(data_loader: Iterable[Batch], *, with_labels: bool) -> list[Batch]:
    """Return this step's micro-batches.

    Raises:
        InvalidArgumentError: none at all, or one that lacks an entry.
    """
    batches = list(data_loader)
    needed = ("input_ids", "labels") if with_labels else ("input_ids",)
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            message = f"micro-batch {index} must be a mapping, got {type(batch).__name__}"
            raise InvalidArgumentError(f"{describe_rank()}: {message}")
        missing = [name for name in needed if name not in batch]
        if missing:
            message = f"micro-batch {index} has no {' and no '.join(missing)}, only {list(batch)}"
            raise InvalidArgumentError(f"{describe_rank()}: {message}")
    if not batches:
        message = "data_loader has no micro-batches: every stage needs all of a step's"
        raise InvalidArgumentError(f"{describe_rank()}: {message}")
    return batches


@contextmanager
def deferred_sync(wrappers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, bool]]:
    """Yield the wrappers that have a gradient sync switch with its value, and put it back after."""
    # A wrapper shows attributes of what it wraps as its own, so hasattr would find one twice.
    found = [w for w in wrappers if SYNC_SWITCH in vars(w) or hasattr(type(w), SYNC_SWITCH)]
    switches = {wrapper: bool(getattr(wrapper, SYNC_SWITCH)) for wrapper in found}
    try:
        yield switches
    finally:
        for wrapper, value in switches.items():
            setattr(wrapper, SYNC_SWITCH, value)


def _same_stages(pipeline: PipelineParallel, group: ProcessGroup | None) -> ProcessGroup | None:
    if group is None:
        return pipeline.group
    if group_ranks(group) != pipeline.ranks:
        raise InvalidArgumentError(
            f"{describe_rank()}: the model's stages are ranks {pipeline.ranks} and the group "
            f"given has ranks {group_ranks(group)}; pass one group to both, or to the model alone"
        )
    return group

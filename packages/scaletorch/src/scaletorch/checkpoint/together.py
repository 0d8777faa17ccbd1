"""Saving and loading on all ranks: what one rank cannot do, none does, and each says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ..dist import all_gather_object, broadcast_object_list, is_main_process
from ..dist.errors import ScaletorchError
from .errors import CheckpointError, DamagedCheckpointError, Failure, joined_error
from .format.reader import CheckpointReader
from .format.writer import CheckpointWriter
from .planner import PartsLoadPlanner, PartsSavePlanner
from .state.entries import Entry

T = TypeVar("T")


def on_first_rank(task: Callable[[], T], group: ProcessGroup | None) -> T:
    """Return what rank 0 finds, on every rank.

    Raises:
        CheckpointError: On every rank, where rank 0 fails.
    """
    answer: list[tuple[T | None, tuple[str, bool] | None]] = [(None, None)]
    if is_main_process():
        try:
            answer = [(task(), None)]
        except Exception as error:  # of whatever kind: the others must know
            failure = _describe(error)
            answer = [(None, (failure.text, failure.damaged))]
    broadcast_object_list(answer, 0, group)
    value, told = answer[0]
    if told is not None:
        failure = Failure(*told)
        raise (DamagedCheckpointError if failure.damaged else CheckpointError)(failure.text)
    return value  # type: ignore[return-value]


def all_or_none(what: str, task: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run a task that needs no other rank, and raise on all ranks if it fails on one.

    Raises:
        CheckpointError: On every rank; but a bad argument stays one on the rank that has it.
    """
    result: T | None = None
    failed: Exception | None = None
    try:
        result = task()
    except Exception as error:  # of whatever kind: the others must know
        failed = error
    told = None if failed is None else tuple(_describe(failed))  # a plain tuple needs no pickle
    reports = all_gather_object(told, group)
    failures = {rank: Failure(*report) for rank, report in enumerate(reports) if report}
    if not failures:
        return result  # type: ignore[return-value]
    if failed is not None and not isinstance(failed, CheckpointError | OSError):
        raise failed
    raise joined_error(failures, what) from failed


def write_together(
    entries: dict[str, Entry],
    planner: PartsSavePlanner,
    writer: CheckpointWriter,
    group: ProcessGroup | None,
    what: str,
) -> None:
    """Save through torch.distributed.checkpoint.

    Raises:
        CheckpointError: On every rank, if one fails.
    """
    try:
        if group is not None:
            state_dict_saver.save(
                entries, storage_writer=writer, planner=planner, process_group=group
            )
            return
        planner.set_up_planner(entries, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer.finish(metadata, [writer.write_data(plans[0], planner).value()])
    except CheckpointException as error:
        raise joined_error(_failures(error), f"{what} failed") from error
    except OSError as error:
        raise CheckpointError(f"{what} failed: {type(error).__name__}: {error}") from error


def read_together(
    entries: dict[str, Entry], reader: CheckpointReader, group: ProcessGroup | None, what: str
) -> None:
    """Load through torch.distributed.checkpoint: check on all ranks, then copy.

    Raises:
        CheckpointError: On every rank, if one fails; nothing was copied if a check failed.
    """
    planner = PartsLoadPlanner()
    try:
        if group is not None:
            state_dict_loader.load(
                entries, storage_reader=reader, planner=planner, process_group=group
            )
            return
        planner.set_up_planner(entries, reader.read_metadata(), is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(plan, planner)
    except CheckpointException as error:
        raise joined_error(_failures(error), f"{what} cannot be loaded") from error
    except OSError as error:
        raise CheckpointError(f"{what} cannot be loaded: {error}") from error


def _describe(error: BaseException) -> Failure:
    ours = isinstance(error, ScaletorchError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    return Failure(text, isinstance(error, DamagedCheckpointError))


def _failures(error: CheckpointException) -> dict[int, Failure]:
    return {rank: _describe(failure[0]) for rank, failure in sorted(error.failures.items())}

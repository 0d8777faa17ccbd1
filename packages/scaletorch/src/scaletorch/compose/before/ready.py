"""Before a step: each rank's own checks, and the one message by which all hear of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...dist import all_reduce, get_comm_device
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError, MismatchError
from ...parallel.context_parallel.building import note_shards, require_computable
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.pg_manager import IGNORED, ProcessGroupManager
from ...parallel.pipeline_parallel.building import read
from ..batches import Batch, MicroBatch
from ..forward import Terms
from .batch_norm import require_whole_batches
from .mixing import pipeline_of
from .positions import as_called

_SUBJECT = "this step"


def ready(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
) -> tuple[list[Batch], int]:
    """Return the micro-batches as the model is called with them, and the global batch's tokens.

    One all-reduce of 24 bytes over all ranks counts the tokens, and says whether a rank cannot go
    on: if one rank alone refused something (its batch, a new parameter, a gradient that is not
    synchronised), the others would wait for it in the middle of the step.

    Raises:
        ScaletorchError: This rank has to refuse something.
        MismatchError: Another rank cannot go on, or some ranks alone are within `no_sync`.
    """
    called: list[Batch] = []
    failed: Exception | None = None
    try:
        called = _called(model, micro_batches, manager, terms)
        count = _tokens(called)
    except Exception as error:  # the others would wait in the all-reduce
        failed, count = error, 0
    counts = manager.tp_rank == 0 and pipeline_of(model).is_last_stage
    alone = not model.require_backward_grad_sync
    facts = [count if counts else 0, int(failed is not None), int(alone)]
    told = torch.tensor(facts, device=get_comm_device(manager.world_group))
    all_reduce(told, group=manager.world_group)
    total, failures, unsynchronised = told.tolist()
    if failures:
        agree(_SUBJECT, [], manager.world_group, error=failed)
    if 0 < unsynchronised < manager.world_size:
        _refuse_unlike(manager, alone=alone)
    return called, int(total)


def _called(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
) -> list[Batch]:
    """Return the micro-batches as the model is called with them; refuse what does not fit it."""
    batches = read(micro_batches, with_labels=True)
    require_whole_batches(model, len(batches), manager)
    model.wrapped.refuse_others(model.module)
    pipeline = pipeline_of(model)
    pipeline.check_ties()
    called = [as_called(batch, terms) for batch in batches]
    if manager.cp_size > 1:
        cut = next((batch.cut for batch in batches if isinstance(batch, MicroBatch)), None)
        if cut is not None:  # others may have been sharded since, for another model
            note_shards(pipeline.module, cut.layout)
        for batch in called:
            require_computable(pipeline.module, batch)
    return called


def _tokens(batches: Sequence[Batch]) -> int:
    """Return the number of labels that count."""
    for batch in batches:
        labels = batch["labels"]
        if labels.is_floating_point() or labels.is_complex():
            raise InvalidArgumentError(f"labels must be integer tensors, got {labels.dtype}")
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)


def _refuse_unlike(manager: ProcessGroupManager, *, alone: bool) -> None:
    """Let all ranks see which of them are within no_sync.

    Raises:
        MismatchError: Always.
    """
    line = "gradients stay on this rank (no_sync)" if alone else "gradients are summed over ranks"
    agree("no_sync(), which all enter and leave alike", [line], manager.world_group)
    raise MismatchError("ranks entered no_sync() otherwise than others")  # not reached

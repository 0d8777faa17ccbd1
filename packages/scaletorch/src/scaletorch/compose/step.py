"""One training step under the one loss rule, whatever the layout.

Each rank checks what it alone can know, and all hear of it in the message that counts the tokens;
then the pipeline runs. The first step looks further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..dist import all_reduce, get_comm_device
from ..dist.building import agree
from ..dist.errors import InvalidArgumentError, MismatchError
from ..parallel.context_parallel.building import note_shards, require_computable
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import IGNORED, ProcessGroupManager
from ..parallel.pipeline_parallel import train_step_pipeline
from ..parallel.pipeline_parallel.building import read
from .balance import require_one_micro_batch, router_loss
from .batches import Batch, MicroBatch, as_called
from .before.batch_norm import require_whole_batches
from .before.buffers import buffers_followed
from .before.initial import require_one_batch
from .before.mixing import require_apart
from .forward import Terms, manager_of, pipeline_of, terms_of
from .loss import find_sharded_head, require_logits_alone, token_loss_sum


def train_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager | None = None,
    *,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Run forward and backward of one global batch; gradients are complete when it returns.

    If a rank has to refuse its batch or model, all ranks hear of it before the step begins, with
    the number of tokens. The first step looks further: whether ranks hold the same batch, whether
    the model mixes positions of sharded sequences outside of attention (two more forwards of one
    micro-batch), and whether it changes buffers by the rows that a rank sees. A model that would
    not train as in one process is refused there, on every rank.

    Args:
        model: What `parallelize` returned.
        micro_batches: This rank's, from `shard_global_batch`.
        manager: The grid; by default the model's.
        scaler: Multiplies all gradients by its scale, but not the loss that is returned; for
            float16, see `scaletorch.parallel.data_parallel.GradScaler`.

    Returns:
        The global loss, sum of token losses / number of valid tokens over the whole global batch,
        and the routers' auxiliary loss of that batch if the model's config asks for it; equal on
        every rank; a 0-d tensor, in float32 at least.

    Raises:
        InvalidArgumentError: The model and the layout, or the batch, do not go together.
        MismatchError: Ranks hold other batches than they must, or another rank has failed.
    """
    manager = manager_of(model, manager)
    terms = terms_of(model)
    called, count = ready(model, micro_batches, manager, terms)
    if terms.seen:
        return _step(model, called, count, manager, terms, scaler)
    require_one_batch(micro_batches, manager)
    with _first_step(model, called, manager, terms):
        return _step(model, called, count, manager, terms, scaler)


def _step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    count: int,
    manager: ProcessGroupManager,
    terms: Terms,
    scaler: GradScaler | None,
) -> Tensor:
    head, balance = find_sharded_head(model), terms.router_loss

    def loss_fn(output: Any, batch: Batch) -> Tensor:
        require_logits_alone(output, with_router_loss=balance is not None)
        loss = token_loss_sum(output, batch["labels"], head) / max(count, 1)
        if balance is not None:
            shares = terms.shares_sequences
            loss = loss + router_loss(output, balance, manager, shares_sequences=shares)
        if scaler is not None and loss.requires_grad:
            loss.register_hook(scaler.scale)  # of the gradient with which backward begins
        return loss

    loss = train_step_pipeline(model, micro_batches, loss_fn=loss_fn, group=manager.pp_group)
    return _summed(loss, manager)


def _summed(loss: Tensor, manager: ProcessGroupManager) -> Tensor:
    """Sum a rank's part of the loss over all ranks that have another part, in place."""
    all_reduce(loss, group=manager.cp_dp_group)
    all_reduce(loss, group=manager.pp_group)  # zero on ranks without the last stage
    return loss


@contextmanager
def _first_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
) -> Iterator[None]:
    """Look at the model before and after the first step; again in the next if nothing was seen."""
    apart = manager.cp_size == 1 or require_apart(model, micro_batches[0], manager)
    with buffers_followed(model, len(micro_batches), manager):
        yield
    terms.seen = apart


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
        agree("this step", [], manager.world_group, error=failed)
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
    require_one_micro_batch(terms.router_loss, batches)
    if terms.has_batch_norms:
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

"""One training step under the one loss rule, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..dist import all_reduce
from ..dist.agreement import agree
from ..parallel.data_parallel import DataParallelBucket, global_token_count
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel import train_step_pipeline
from .auxiliary import require_logits_alone
from .batch_norm import require_whole_batches
from .batches import Batch
from .buffers import buffers_followed
from .forward import Terms, terms_of
from .initial import require_one_batch
from .loss import find_sharded_head, token_loss_sum
from .mixing import require_apart
from .positions import as_called


def train_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    *,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Run forward and backward of one global batch; gradients are complete when it returns.

    The first step looks at the model as well: whether ranks hold the same batch, whether the model
    mixes positions of divided sequences outside of attention (two more forwards of one
    micro-batch), and whether it changes buffers by what a rank sees. What would not train as in
    one process is refused there, on every rank.

    Args:
        model: what ``parallelize`` returned.
        micro_batches: this rank's, from ``shard_global_batch``.
        manager: the grid.
        scaler: multiplies all gradients by its scale, but not the loss that is returned; for
            float16, see `scaletorch.parallel.data_parallel.GradScaler`.

    Returns:
        The global loss, sum of token losses / number of valid tokens over the whole global batch,
        equal on every rank; a 0-d tensor.

    Raises:
        InvalidArgumentError: the model and the layout, or the batch, do not go together.
        MismatchError: ranks hold other batches than they must, or another rank has failed.
    """
    terms = terms_of(model)
    if terms.seen:
        called = _called(model, micro_batches, manager, terms)
        return _step(model, called, manager, scaler)
    called = _agreed(model, micro_batches, manager, terms)
    with _first_step(model, called, manager, terms):
        return _step(model, called, manager, scaler)


def _step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    scaler: GradScaler | None,
) -> Tensor:
    count = global_token_count([b["labels"] for b in micro_batches], group=manager.cp_dp_group)
    head = find_sharded_head(model)

    def loss_fn(output: Any, batch: Batch) -> Tensor:
        require_logits_alone(output)
        loss = token_loss_sum(output, batch["labels"], head) / max(count, 1)
        if scaler is not None and loss.requires_grad:
            loss.register_hook(scaler.scale)  # of the gradient with which backward begins
        return loss

    loss = train_step_pipeline(model, micro_batches, loss_fn=loss_fn, group=manager.pp_group)
    all_reduce(loss, group=manager.cp_dp_group)
    all_reduce(loss, group=manager.pp_group)  # zero where the last stage is not
    return loss


def _called(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
) -> list[Batch]:
    """Return the micro-batches as the model is called with them."""
    require_whole_batches(model, len(micro_batches), manager)
    return [as_called(batch, terms) for batch in micro_batches]


def _agreed(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
) -> list[Batch]:
    """Do as `_called`, and let all ranks know where one of them cannot."""
    called: list[Batch] = []
    failed: Exception | None = None
    try:
        called = _called(model, micro_batches, manager, terms)
    except Exception as error:  # the others would wait in what comes next
        failed = error
    agree("the first step of this model", [], manager.world_group, error=failed)
    require_one_batch(micro_batches, manager)
    return called


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

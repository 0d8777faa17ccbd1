"""One training step under the one loss rule, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..dist import all_reduce
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel import train_step_pipeline
from .batches import Batch
from .before.auxiliary import require_logits_alone
from .before.buffers import buffers_followed
from .before.initial import require_one_batch
from .before.mixing import require_apart
from .before.ready import ready
from .forward import Terms, manager_of, terms_of
from .loss import find_sharded_head, token_loss_sum


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
        equal on every rank; a 0-d tensor, in float32 at least.

    Raises:
        InvalidArgumentError: The model and the layout, or the batch, do not go together.
        MismatchError: Ranks hold other batches than they must, or another rank has failed.
    """
    manager = manager_of(model, manager)
    terms = terms_of(model)
    called, count = ready(model, micro_batches, manager, terms)
    if terms.seen:
        return _step(model, called, count, manager, scaler)
    require_one_batch(micro_batches, manager)
    with _first_step(model, called, manager, terms):
        return _step(model, called, count, manager, scaler)


def _step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    count: int,
    manager: ProcessGroupManager,
    scaler: GradScaler | None,
) -> Tensor:
    head = find_sharded_head(model)

    def loss_fn(output: Any, batch: Batch) -> Tensor:
        require_logits_alone(output)
        loss = token_loss_sum(output, batch["labels"], head) / max(count, 1)
        if scaler is not None and loss.requires_grad:
            loss.register_hook(scaler.scale)  # of the gradient with which backward begins
        return loss

    loss = train_step_pipeline(model, micro_batches, loss_fn=loss_fn, group=manager.pp_group)
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

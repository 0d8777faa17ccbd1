"""The ranks' own step of a rehearsal: a real one, of which nothing counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...parallel.context_parallel.building import without_zeros
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.pg_manager import ProcessGroupManager
from ..forward import Terms, pipeline_of, rehearsing, wait_for_parameters
from ..forwards import losses_per_item
from ..plain import Plain
from .batch import SmallBatch
from .quiet import restored, without_dropout
from .recording import Records, recorded
from .width import in_float32

Step = Callable[..., Tensor]


@contextmanager
def as_for_a_rehearsal(
    model: DataParallelBucket, plain: Plain, terms: Terms, *, wide: bool
) -> Iterator[None]:
    """Let a step be a rehearsal, in float32 or not, and all be as before it in the end.

    It counts no tokens, sums gradients, also in `no_sync`, and drops nothing; no parameter is zero,
    as a gate or a branch's last projection may be, behind which nothing would show.
    """
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    stage = pipeline_of(model).module
    terms.seen = 0
    wait_for_parameters(model)
    try:
        wider = in_float32(model, plain.model) if wide else nullcontext()
        with rehearsing(), restored(stage), wider, without_zeros(stage), without_dropout():
            yield
    finally:
        model.reset()
        model.require_backward_grad_sync = before


def trained(
    cut: Callable[..., SmallBatch],
    model: DataParallelBucket,
    plain: Plain,
    step: Step,
    count: Callable[[SmallBatch], None],
) -> tuple[SmallBatch, Tensor, Records]:
    """Train a small batch, on all positions if few of them fail.

    Returns:
        The batch, the loss, and the calls of units.
    """

    def train(small: SmallBatch) -> tuple[SmallBatch, Tensor, Records]:
        count(small)
        with recorded(pipeline_of(model), plain.names_of_units()) as records:
            return small, step(small.micro_batches), records

    small = cut(shortens=True)
    try:
        return train(small)
    except Exception as error:  # it may be made for one length
        if not small.is_short or isinstance(error, torch.OutOfMemoryError):
            raise
        model.reset()
    return train(cut(shortens=False))


def count_losses(
    model: DataParallelBucket,
    terms: Terms,
    manager: ProcessGroupManager,
    loss_fn: Callable[[Any, Any], Any] | None,
    small: SmallBatch,
) -> None:
    """Count the losses of a small batch, so that its step's estimate is the count itself."""
    if loss_fn is not None:
        terms.counted = losses_per_item(model, small.micro_batches, manager, loss_fn)

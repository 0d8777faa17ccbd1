"""Train one step; the loss is the same on every layout.

Before the pipeline runs, each rank checks its own inputs, and the all-reduce that counts the tokens
reports to all ranks whether one has failed. The first step checks more; see `train_step`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..dist import all_gather_object, all_reduce, get_rank
from ..dist.errors import InvalidArgumentError, MismatchError, NonFiniteError, StateError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.data_parallel.building import scale_gradients
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pipeline_parallel import train_step_pipeline
from .batches import Batch, Called, real_positions
from .checks import explain_failures, refuse_changes
from .forward import Terms, manager_of, pipeline_of, rehearses, terms_of
from .gradients import sum_partial_gradients
from .loss import find_sharded_head, loss_of_tokens, require_logits_alone, token_loss_sum
from .own_loss import (
    MOST,
    NOTHING_COUNTS,
    CountFunction,
    LossFunction,
    Number,
    OwnLoss,
    keep_gradients,
)
from .preparation import has_gradients, prepare_step
from .rehearsal.rehearse import rehearse_step
from .samples import take_sample


def train_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager | None = None,
    *,
    loss_fn: LossFunction | None = None,
    count_fn: CountFunction | None = None,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Run forward and backward of one global batch; all ranks call it.

    Gradients are complete when it returns, except within `no_sync`; then call `optimizer.step()`.
    Before each step ranks check their batches and models, and all raise if one fails. They compare
    a sample of the parameters that they share, and the loop's changes to gradients.

    The first step begins with a rehearsal (see `rehearse`); so does the first with another loss_fn,
    other entries or in another mode, unless the forward keeps state in attributes.

    Args:
        model: The model that `parallelize` returned.
        micro_batches: This rank's micro-batches, from `shard_global_batch`.
        manager: The grid; by default the model's.
        loss_fn: `loss_fn(output, micro_batch)` returns the sum of the losses of this rank's rows
            and positions, a 0-d tensor, and their number. Ranks that differ in tp alone return the
            same values. It is called on the last stage. None is the cross entropy of tokens.
        count_fn: `count_fn(micro_batch)` returns the same number from the micro-batch alone. It
            matters only if gradients of several steps accumulate; None then counts labels other
            than -100. Else loss_fn's number is used.
        scaler: Multiplies all gradients by its scale, but not the returned loss; for float16, see
            `scaletorch.parallel.data_parallel.GradScaler`.

    Returns:
        The loss of the whole global batch: sum of token losses / number of valid tokens, or the sum
        of a loss_fn / its count. A 0-d tensor, in float32 at least, equal on every rank.

    Raises:
        InvalidArgumentError: The model, the batch or loss_fn's result does not fit.
        RehearsalError: The layout does not compute what one process computes; see `rehearse`.
        MismatchError: Batches, shared parameters, gradient scales or losses differ between ranks
            that must have the same, or another rank has failed.
        NonFiniteError: A gradient is not finite, and the model checks them (`check_finite`).
    """
    manager, terms = manager_of(model, manager), terms_of(model)
    own_loss = _own_loss(model, manager, loss_fn, count_fn)
    proof = partial(rehearse, model, micro_batches, manager, loss_fn=loss_fn, count_fn=count_fn)
    called, count = _rehearse_and_prepare(model, micro_batches, manager, own_loss, loss_fn, proof)
    if own_loss is not None and not count:
        raise InvalidArgumentError(NOTHING_COUNTS)
    terms.real_positions = real_positions(called[0].micro_batch)
    if terms.seen > terms.several:
        return _step(model, called, count, manager, terms, scaler, own_loss)
    with explain_failures(model, manager, len(micro_batches)):
        own_loss = own_loss or OwnLoss(loss_of_tokens, None, model, manager, trains=True)
        with refuse_changes(model, manager):
            loss = _step(model, called, count, manager, terms, scaler, own_loss)
        terms.seen = 1 + terms.several
        return loss


def rehearse(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager | None = None,
    *,
    loss_fn: LossFunction | None = None,
    count_fn: CountFunction | None = None,
) -> None:
    """Train a small batch, and compare everything that the layout computes with the plain model.

    The small batch has up to two rows of each micro-batch and at most 512 positions. It trains in a
    real step, with buckets, schedules and ZeRO. Then ranks run the plain model, with the weights of
    one layer at a time: each layer gets the hidden states of the layout's step, and its output, the
    gradient of its input and those of its weights are compared; so are the loss and the modules
    outside of layers.

    A model in 16 bits is rehearsed in float32 if memory allows. Dropout is off. Afterwards
    gradients, buffers, random generators and plain attributes of modules are as before. Rank 0
    prints one line that says what was compared, and what could not be. All ranks call it, while the
    model has no gradients.

    Args:
        model: The model that `parallelize` returned, with `rehearse=True`.
        micro_batches: This rank's micro-batches, from `shard_global_batch`.
        manager: The grid; by default the model's.
        loss_fn: As in `train_step`.
        count_fn: As in `train_step`.

    Raises:
        RehearsalError: The layout differs from the plain model by more than rounding; on every
            rank, with the first layer and tensor that differ.
        StateError: `parallelize` kept no plain model, or the model has gradients.
    """
    manager, terms = manager_of(model, manager), terms_of(model)
    if manager.world_size * len(micro_batches) == 1:
        return
    terms.rehearses = False
    terms.rehearsed.add(_work_of(model, micro_batches, loss_fn))
    if terms.plain is None:
        raise StateError(
            "rehearse compares with the plain model, whose structure parallelize keeps unless it "
            "is called with rehearse=False, or the model cannot be copied"
        )
    if has_gradients(model):
        raise StateError(
            f"{describe_rank()}: a rehearsal has gradients of its own, and the model has some "
            "already: call it before the first step, or after zero_grad"
        )
    with keep_gradients(loss_fn, model) as kept_loss:
        step = partial(train_step, model, manager=manager, loss_fn=kept_loss, count_fn=count_fn)
        rehearse_step(model, micro_batches, terms, manager, step, kept_loss)


def _rehearse_and_prepare(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    own_loss: OwnLoss | None,
    loss_fn: LossFunction | None,
    proof: Callable[[], None],
) -> tuple[list[Called], Number]:
    """Return the result of `prepare_step`, after a rehearsal if this is the first step of its kind.

    Later than the first step, ranks rehearse if `prepare_step` reports that it is new on all.
    """
    terms = terms_of(model)
    work = _work_of(model, micro_batches, loss_fn)
    is_new = terms.plain is not None and work not in terms.rehearsed
    if is_new and terms.rehearsed and terms.keeps_state:  # the plain model has old state
        is_new = False
        terms.rehearsed.add(work)
        if get_rank() == 0 and not rehearses():
            sys.stderr.write(
                f"rehearsal: this kind of step of {terms.name} is new and is not compared, since "
                "its forward keeps state in attributes\n"
            )
    terms.rehearses = is_new and not rehearses() and not has_gradients(model)
    if terms.rehearses and not terms.rehearsed:
        proof()
    found = prepare_step(model, micro_batches, manager, terms, own_loss)
    if terms.rehearses and terms.rehearsed:
        proof()
        found = prepare_step(model, micro_batches, manager, terms, own_loss)
    return found


def _work_of(
    model: DataParallelBucket, micro_batches: Sequence[Batch], loss_fn: LossFunction | None
) -> object:
    """Return the kind of a step: the code of its loss, its entries, and the mode."""
    # `prepare_step` refuses batches that are no mappings.
    entries = frozenset(n for batch in micro_batches if isinstance(batch, Mapping) for n in batch)
    function: Any = loss_fn
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a method
    code = getattr(function, "__code__", type(function))
    return code, entries, pipeline_of(model).module.training


def _own_loss(
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    loss_fn: LossFunction | None,
    count_fn: CountFunction | None,
) -> OwnLoss | None:
    """Return the user's loss; None for the cross entropy of tokens."""
    if loss_fn is None:
        if count_fn is None:
            return None
        raise InvalidArgumentError("count_fn counts the losses of a loss_fn: pass loss_fn too")
    own_loss = OwnLoss(loss_fn, count_fn, model, manager, trains=True)
    own_loss.counts_later = count_fn is None and model.require_backward_grad_sync
    return own_loss


def _step(
    model: DataParallelBucket,
    micro_batches: Sequence[Called],
    count: Number,
    manager: ProcessGroupManager,
    terms: Terms,
    scaler: GradScaler | None,
    own_loss: OwnLoss | None,
) -> Tensor:
    head = find_sharded_head(model)
    later = own_loss is not None and own_loss.counts_later

    def loss_fn(output: Any, batch: Any) -> Tensor:
        if own_loss is None:
            require_logits_alone(output)
            loss = _mean(token_loss_sum(output, batch["labels"], head), count)
        else:
            total, losses = own_loss.call(output, batch)
            if later and terms.counted is None:
                terms.counted = own_loss.per_item(losses, batch)
            loss = total / (count * (terms.counted or 1.0) if later else count or 1)
        if scaler is not None and loss.requires_grad:
            loss.register_hook(scaler.scale)  # scales the gradient with which backward begins
        return loss

    terms.correction = 1.0
    with sum_partial_gradients(model, manager), _raise_together(model, manager):
        loss = train_step_pipeline(model, micro_batches, loss_fn=loss_fn, group=manager.pp_group)
    if own_loss is not None:
        own_loss.settle(loss)
    total = _summed(loss, manager)
    if own_loss is not None and later:
        total = total * _correct_gradients(model, float(count), own_loss, manager)
    take_sample(model, [] if own_loss is None else [p for p, _ in own_loss.beside.values()])
    return total


def _correct_gradients(
    model: DataParallelBucket, size: float, own_loss: OwnLoss, manager: ProcessGroupManager
) -> float:
    """Multiply gradients by the estimated / the true count of losses, and return this factor."""
    terms, estimate = terms_of(model), size * (terms_of(model).counted or 1.0)
    told = torch.zeros(1 + manager.tp_size, dtype=torch.float64)  # and the count by each tp rank
    if pipeline_of(model).is_last_stage:
        told[0] = estimate if manager.cp_dp_rank == manager.tp_rank == 0 else 0.0
        told[1 + manager.tp_rank] = own_loss.counted()
    all_reduce(told, group=manager.world_group)
    estimate, found, *others = told.tolist()
    if any(abs(each - found) > MOST * max(each, found) for each in others):
        raise MismatchError(
            f"{describe_rank()}: loss_fn counted {', '.join(f'{x:g}' for x in (found, *others))} "
            "losses on ranks that hold the same positions and differ in tp alone: let it count "
            "from labels or whole logits"
        )
    if not found:
        raise InvalidArgumentError(NOTHING_COUNTS)
    terms.counted, terms.correction = found / size, estimate / found
    factor = torch.tensor(terms.correction, dtype=torch.float64)
    scale_gradients(model, factor)
    for parameter, is_new in own_loss.beside.values():
        if is_new and parameter.grad is not None:
            parameter.grad.mul_(factor)
    return terms.correction


def _mean(total: Tensor, count: Number) -> Tensor:
    """Divide the sum of a micro-batch's token losses by the count of the global batch."""
    if isinstance(count, Tensor):  # on an accelerator, where it stays
        return total / count.clamp(min=1).to(total.device)
    return total / max(count, 1)


@contextmanager
def _raise_together(model: DataParallelBucket, manager: ProcessGroupManager) -> Iterator[None]:
    """Raise for non-finite gradients only after the step, on all ranks together.

    Only the ranks that sum a gradient (those of an expert, a stage or a tp rank) see that it is not
    finite. If they raised at once, the others would wait for them in the middle of the step.
    """
    if not model.checks_finite:
        yield
        return
    with model.nonfinite_held() as found:
        yield
    told = torch.tensor([len(found)])
    all_reduce(told, "max", group=manager.world_group)
    if not int(told):
        return
    texts = all_gather_object([str(error) for error in found], manager.world_group)
    model.reset()
    if found:
        raise found.pop(0)  # popped, since its traceback refers to this frame and thus to the list
    first = next(text for each in texts for text in each)
    raise NonFiniteError(f"{describe_rank()}: gradients of other ranks are not finite. {first}")


def _summed(loss: Tensor, manager: ProcessGroupManager) -> Tensor:
    """Sum the ranks' shares of the loss over cp, dp and pp."""
    # A loss_fn may return different dtypes on different ranks, and a sum needs one dtype.
    total = loss.double() if loss.device.type != "mps" else loss
    all_reduce(total, group=manager.cp_dp_group)
    all_reduce(total, group=manager.pp_group)  # zero on ranks without the last stage
    return total.to(loss.dtype)

"""Rehearse a step: train a small batch on the layout, and beside it the plain model, whole."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...dist import all_gather_object, get_rank
from ...dist.errors import RehearsalError
from ...parallel.context_parallel.building import asked
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ..balance import router_loss
from ..batches import Batch, Called, real_positions, real_tokens
from ..before.initial import require_one_batch
from ..forward import Terms, pipeline_of
from ..loss import token_loss_sum
from ..loss_batch import LossBatch
from .batch import OneProcess, SmallBatch, small_batch
from .joining import Joiner
from .judging import Finding, Judge
from .plain import Plain
from .quiet import restored, without_dropout
from .ranks import Ranks
from .recording import recorded
from .replay import Replay

_ALL_AT_ONCE = 2**28  # bytes of weights that a rank may hold beside its own, if need be

Step = Callable[[Sequence[Batch]], Tensor]


def rehearse_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    terms: Terms,
    manager: ProcessGroupManager,
    step: Step,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> None:
    """Train a small batch of a step's rows, and compare everything with the plain model.

    Gradients, buffers, random generators and plain attributes are as before afterwards.

    Args:
        model: What `parallelize` returned.
        micro_batches: This rank's, of the step.
        terms: The model's.
        manager: The grid.
        step: Trains micro-batches, without an optimizer; returns the loss.
        loss_fn: The user's, as in `train_step`.

    Raises:
        RehearsalError: The layout computes something else than one process; on every rank.
    """
    plain = terms.plain
    if plain is None:
        return
    began = time.perf_counter()
    require_one_batch(micro_batches, manager)
    small = small_batch(micro_batches, model, terms, manager)
    if small is None:
        _say(f"{terms.name} is not rehearsed: micro-batches were cut by hand")
        return
    units = {name: plain.names_of_unit(name) for name in plain.units}
    pipeline = pipeline_of(model)
    terms.apart = True  # which is seen here
    asked(pipeline.module)
    with restored(pipeline.module), without_dropout():
        with recorded(pipeline, units) as records:
            loss = step(small.micro_batches)
        first = small.whole["input_ids"]
        device = next((p.device for p in model.parameters()), first.device)
        count = len(small.micro_batches)
        joiner = Joiner(manager, small.sequences, small.rows, count, device)
        ranks = Ranks(model, manager, plain, joiner, records)
        ranks.exchange()
        plain.follow(pipeline.module, device)
        one = OneProcess(small.sequences.ring.group)
        loss_of = partial(_loss, small, terms, loss_fn, one)
        called = _on(small.called, device)
        judge, replay, problem = _replayed(plain, ranks, called, loss_of, loss)
        if problem is not None and _size(plain) <= _ALL_AT_ONCE:
            plain.join_units()
            judge, replay, problem = _replayed(plain, ranks, called, loss_of, loss)
    model.reset()
    _settle(judge, replay, problem, terms, manager, time.perf_counter() - began)


def _replayed(
    plain: Plain,
    ranks: Ranks,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor | None],
    loss: Tensor,
) -> tuple[Judge, Replay, str | None]:
    """Run the plain model; return also why it could not run, if it could not."""
    judge = Judge(_chain(plain, batch["input_ids"]))
    replay = Replay(plain, ranks, judge)
    ranks.compared.clear()
    try:
        with restored(plain.model):
            replay.run(batch, loss_of, loss)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return judge, replay, f"{type(error).__name__}: {error}"
    return judge, replay, None


def _size(plain: Plain) -> int:
    return sum(p.numel() * p.element_size() for p in plain.model.parameters())


def _chain(plain: Plain, ids: Tensor) -> int:
    """Return how many additions stand, at most, between inputs and any number compared."""
    matrices = sum(sum(p.shape) for p in plain.model.parameters() if p.ndim > 1)
    return matrices + 2 * ids.numel()


def _on(batch: Called, device: torch.device) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in batch.items()}


class _Watch(TorchDispatchMode):
    """Notes whether anything is sent or received."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.communicates |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **kwargs or {})


def _loss(
    small: SmallBatch,
    terms: Terms,
    loss_fn: Callable[[Any, Any], Any] | None,
    one: Any,
    output: Any,
) -> Tensor | None:
    """Return the loss of one process; None if it communicates, as if there were ranks."""
    batch = small.called.micro_batch
    if loss_fn is None:
        labels = batch["labels"].to(getattr(output, "logits", output).device)
        loss = token_loss_sum(output, labels) / max(int((labels != -100).sum()), 1)
    else:
        with _Watch() as watch:
            total, count = loss_fn(output, LossBatch(batch, None, one))
        if watch.communicates:
            return None
        loss = total / count
    if terms.router_loss is not None:
        real = real_tokens(batch, real_positions(batch))
        loss = loss + router_loss(output, terms.router_loss, one, shares_sequences=False, real=real)
    return loss


def _settle(
    judge: Judge,
    replay: Replay,
    problem: str | None,
    terms: Terms,
    manager: ProcessGroupManager,
    seconds: float,
) -> None:
    """Say what was found; raise on every rank if something differs."""
    told = all_gather_object((judge.findings[:3], problem), manager.world_group)
    found = [(each.order, rank, each) for rank, (theirs, _) in enumerate(told) for each in theirs]
    if found:
        _refuse(min(found, key=lambda each: each[:2])[2], told, terms, manager)
    problem = next((text for _, text in told if text), None)
    if problem is not None:
        terms.apart, terms.seen = False, 0  # so that the step itself looks
        _say(f"{terms.name} could not be rehearsed: its plain module failed ({problem})")
        return
    without = [*replay.unasked, *(f"hidden states of {name}" for name in replay.ranks.apart)]
    unasked = f"; not compared: {', '.join(without)}" if without else ""
    units = len(replay.plain.units)
    if get_rank() == 0:
        sys.stderr.write(
            f"rehearsal: {units} units on {manager.grid} agree with one process to "
            f"{judge.worst:.1e}, {seconds:.1f} s{unasked}\n"
        )


def _refuse(
    first: Finding,
    told: Sequence[tuple[Sequence[Finding], str | None]],
    terms: Terms,
    manager: ProcessGroupManager,
) -> NoReturn:
    right = [str(rank) for rank, (theirs, _) in enumerate(told) if not theirs]
    others = [each.what for theirs, _ in told for each in theirs if each.what != first.what]
    note = f" ({first.note})" if first.note else ""
    raise RehearsalError(
        f"{describe_rank()}: {terms.name} computes something else on {manager.grid} than in one "
        f"process: {first.what} is off by {first.error:.2g} of its size{note}, which rounding "
        "does not explain"
        + (f"; then {', '.join(dict.fromkeys(others[:2]))}" if others else "")
        + (f"; right on ranks {', '.join(right)}" if right else "")
        + ". What the unit, or the code before it, computes on a share (of features, positions or "
        "rows) is not what it computes on the whole: name it in the plan, leave it out of it, or "
        "take this axis at size 1. parallelize(..., rehearse=False) trains it all the same"
    )


def _say(text: str) -> None:
    if get_rank() == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=4)

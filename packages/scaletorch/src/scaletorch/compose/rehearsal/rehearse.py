"""Rehearse a step: train a small batch on the layout, and beside it the plain model, whole."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...dist import all_gather_object, get_rank
from ...dist.errors import InvalidArgumentError, RehearsalError
from ...parallel.context_parallel.building import asked
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ..balance import router_loss
from ..batches import Batch, Called, real_positions, real_tokens
from ..before.initial import require_one_batch
from ..before.mixing import require_apart
from ..forward import Terms, pipeline_of
from ..loss import token_loss_sum
from ..loss_batch import LossBatch
from ..plain import Plain
from ..ready import as_called
from ..summation import chain_length
from .batch import SmallBatch, small_batch
from .joining import Joiner
from .judging import Finding, Judge
from .quiet import restored, without_dropout
from .ranks import Ranks
from .recording import recorded
from .replay import Replay

_ALL_AT_ONCE = 2**28  # bytes of weights that a rank may hold beside its own, if need be
_WAY_OUT = (
    "What a unit, or the code before it, computes on a share (of features, positions or rows) is "
    "not what it computes on the whole: name it in the plan, leave it out of it, or take that axis "
    "at size 1"
)

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
        loss_of = partial(_loss, small, terms, loss_fn)
        called = _on(small.called, device)
        judge, replay, problem = _replayed(plain, ranks, called, loss_of, loss)
        if problem is not None and _size(plain) <= _ALL_AT_ONCE:
            plain.join_units()
            judge, replay, problem = _replayed(plain, ranks, called, loss_of, loss)
    model.reset()
    found = _first_of_all(judge, problem, manager)
    if found.first is not None:
        _refuse(found.first, found, terms, manager, _explained(model, small, terms, manager))
    _report(judge, replay, found.problem, terms, manager, time.perf_counter() - began)


def _replayed(
    plain: Plain,
    ranks: Ranks,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor | None],
    loss: Tensor,
) -> tuple[Judge, Replay, str | None]:
    """Run the plain model; return also why it could not run, if it could not."""
    judge = Judge(chain_length(plain.model, batch["input_ids"]))
    replay = Replay(plain, ranks, judge)
    ranks.compared.clear()
    try:
        with restored(plain.model):
            replay.run(batch, loss_of, loss)
    except Exception as error:  # a plain module may do anything
        return judge, replay, f"{type(error).__name__}: {error}"
    return judge, replay, None


def _size(plain: Plain) -> int:
    return sum(p.numel() * p.element_size() for p in plain.model.parameters())


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
    output: Any,
) -> Tensor | None:
    """Return the loss of one process; None if it communicates, as if there were ranks."""
    batch, one = small.called.micro_batch, cast(Any, small.alone)
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


class _Found(NamedTuple):
    """The differences that the ranks found.

    Attributes:
        first: The first difference of any rank.
        then: What else differs.
        right: Ranks that have found nothing.
        problem: Why the plain model could not run.
    """

    first: Finding | None
    then: list[str]
    right: list[int]
    problem: str | None


def _first_of_all(judge: Judge, problem: str | None, manager: ProcessGroupManager) -> _Found:
    told = all_gather_object((judge.findings[:3], problem), manager.world_group)
    found = sorted(
        ((each.order, rank, each) for rank, (theirs, _) in enumerate(told) for each in theirs),
        key=lambda each: each[:2],
    )
    first = found[0][2] if found else None
    then = [each.what for _, _, each in found if first is not None and each.what != first.what]
    right = [rank for rank, (theirs, _) in enumerate(told) if not theirs]
    return _Found(first, [*dict.fromkeys(then)], right, next((t for _, t in told if t), None))


def _report(
    judge: Judge,
    replay: Replay,
    problem: str | None,
    terms: Terms,
    manager: ProcessGroupManager,
    seconds: float,
) -> None:
    """Say that the layout agrees with one process, or what could not be asked."""
    if problem is not None:
        terms.apart, terms.seen = False, 0  # so that the step itself looks
        _say(f"{terms.name} could not be rehearsed: its plain module failed ({problem})")
        return
    without = [*replay.unasked, *(f"hidden states of {name}" for name in replay.ranks.apart)]
    unasked = f"; not compared: {', '.join(without)}" if without else ""
    if get_rank() == 0:
        _write(
            f"rehearsal: {len(replay.plain.units)} units on {manager.grid} agree with one process "
            f"to {judge.worst:.1e}, {seconds:.1f} s{unasked}\n"
        )


def _write(line: str) -> None:
    sys.stderr.write(line)


def _explained(
    model: DataParallelBucket, small: SmallBatch, terms: Terms, manager: ProcessGroupManager
) -> str:
    """Return what is known of why a layout differs; all ranks call it."""
    if manager.cp_size == 1:
        return ""
    try:
        require_apart(model, as_called(small.micro_batches[0], terms), manager)
    except InvalidArgumentError as error:
        return f". {error}"
    return ""


def _refuse(
    first: Finding, found: _Found, terms: Terms, manager: ProcessGroupManager, why: str
) -> NoReturn:
    note = f" ({first.note})" if first.note else ""
    raise RehearsalError(
        f"{describe_rank()}: {terms.name} computes something else on {manager.grid} than in one "
        f"process: {first.what} is off by {first.error:.2g} of its size{note}, which rounding "
        "does not explain"
        + (f"; then {', '.join(found.then[:2])}" if found.then else "")
        + (f"; right on ranks {', '.join(map(str, found.right))}" if found.right else "")
        + (why or f". {_WAY_OUT}")
        + ". parallelize(..., rehearse=False) trains it all the same"
    )


def _say(text: str) -> None:
    if get_rank() == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=4)

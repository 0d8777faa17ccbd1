"""Rehearse a step: train a small batch on the layout, and compare it with the plain model."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...dist import all_gather_object, get_rank
from ...dist.errors import RehearsalError
from ...parallel.context_parallel.building import expect_attention
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ...parallel.pg_manager.building import restored
from ..batches import Batch
from ..checks import require_one_batch
from ..forward import Terms, pipeline_of
from ..loss import LossBatch, token_loss_sum
from ..naming import listed
from ..plain import Plain
from ..summation import chain_length
from .batch import SmallBatch, entries_added, on_device, small_batch
from .judge import Finding, Judge
from .ranks import DivergedError, Ranks
from .replay import Replay
from .training import rehearsal_mode, trained, wish_for_float32

_ADVICE = {  # axis -> the likely mistake if results differ
    "tp": "tp divides features: style a weight that packs several projections Fused; where code "
    "needs all features, gather them ('column_gather') or leave the layers before it out of the "
    "plan",
    "sequence_parallel": "sequence parallelism divides tokens between layers: style a module that "
    "mixes or counts them 'sequence_whole', or the layers 'sequence_layer'",
    "cp": "cp divides positions: mix them by F.scaled_dot_product_attention alone, and read the "
    "forward's argument position_ids rather than count them; positions that do not begin at 0 "
    "have to be in the batch as position_ids",
    "rows": "dp and micro-batches divide rows: compute each from that row alone",
    "pp": "pp hands hidden states and their gradients from stage to stage: what changes them "
    "between layers, as a hook does, has to be in a layer",
}
_ALL_AT_ONCE = 2**28  # bytes of a whole model that a rank may hold in addition to its shards

Step = Callable[..., Tensor]


def rehearse_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    terms: Terms,
    manager: ProcessGroupManager,
    step: Step,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> None:
    """Train a small batch of rows by `step(micro_batches)`, and compare with the plain model."""
    began, plain = time.perf_counter(), cast(Plain, terms.plain)
    require_one_batch(micro_batches, manager)
    terms.looked = True
    pipeline = pipeline_of(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    added, narrow = _agree_on_entries(micro_batches, model, device, terms, manager)
    if added is None:
        return
    if added:  # the plain run lacks these entries for the whole batch: use the loss of tokens
        loss_fn, step = None, partial(step, loss_fn=None, count_fn=None)
    cut = partial(small_batch, micro_batches, model, terms, manager)
    expect_attention(pipeline.module, False)
    plain.follow(pipeline.module, device)

    def compared(*, wide: bool, steps: int = 1) -> tuple[Replay, _Found]:
        with rehearsal_mode(model, plain, terms, wide=wide), restored(plain.model):
            for _ in range(steps):
                cuts = partial(cut, wide=wide)
                small, loss, records, kept = trained(cuts, model, plain, step)
                ranks = Ranks(model, manager, plain, small, records, device)
                ranks.exchange()
                batch = {n: on_device(x, device) for n, x in small.called.items()}
                run = partial(_loss, small, loss_fn)
                made = _replay(plain, ranks, batch, run, loss, kept=kept, shares=steps == 1)
                if made[1].first is not None or made[1].problem is not None:
                    break
                model.reset()
        return made

    try:
        replay, found = _compare_in_float32(compared, narrow)
        terms.keeps_state = found.kept != []
        kept = found.kept or [] if found.first is None and found.problem is None else []
        if kept:  # changed attributes may alter the next forward
            replay, found = _compare_in_float32(partial(compared, steps=2), narrow)
    except Exception as error:
        if not added or isinstance(error, torch.OutOfMemoryError):
            raise
        _say(
            f"{terms.name} is not rehearsed: its loss_fn reads {listed(added)}, added to "
            f"micro-batches, and the loss of tokens in its place fails ({error})"
        )
        return
    if found.first is not None:
        _refuse(found.first, found, terms, manager, len(micro_batches), kept)
    replay.unasked += [f"loss_fn, which reads {listed(added)}"] * bool(added)
    _report(replay, found, terms, pipeline.module, time.perf_counter() - began)


def _compare_in_float32(
    compared: Callable[..., tuple[Replay, _Found]], narrow: str | None
) -> tuple[Replay, _Found]:
    """Compare in float32; in the own dtype if that fails, or if `narrow` (a reason) is not None."""
    if narrow is not None:
        replay, found = compared(wide=False)
        replay.unasked += [f"anything in float32, {narrow}"] * bool(narrow)
        return replay, found
    try:
        replay, found = compared(wide=True)
        problem = found.problem
        if problem is None:
            return replay, found
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the run's own dtype may still work
        problem = f"{type(error).__name__}: {error}"
    replay, found = compared(wide=False)
    replay.unasked.append(f"anything in float32, which fails ({problem})")
    return replay, found


def _agree_on_entries(
    micro_batches: Sequence[Batch],
    model: DataParallelBucket,
    device: torch.device,
    terms: Terms,
    manager: ProcessGroupManager,
) -> tuple[list[str] | None, str | None]:
    """Return the entries added for a loss (None: no rehearsal), and `narrow`; the same on ranks."""
    own = entries_added(micro_batches), *wish_for_float32(model, device)
    added, wished, problems = zip(*all_gather_object(own, manager.world_group), strict=True)
    narrow = next(filter(None, problems), None) if any(wished) else ""
    if None in added:
        _say(
            f"{terms.name} is not rehearsed: its micro-batches, or entries of them, do not come "
            "from shard_global_batch"
        )
        return None, narrow
    return sorted({name for names in added for name in names or ()}), narrow


def _replay(
    plain: Plain,
    ranks: Ranks,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor | None],
    loss: Tensor,
    *,
    kept: list[str] | None,
    shares: bool,
) -> tuple[Replay, _Found]:
    """Run the plain model; return the replay and the findings of all ranks.

    If `shares`, ranks first share the units; if anything differs or fails, each runs all units. If
    that fails, or gradients differ, a small model runs as a whole: its root may use the weights of
    units, and units the tensors of others. `kept` has attributes that the forward changed.
    """
    additions = chain_length(plain.model, batch["input_ids"])

    def run(*, gives_out: bool = False) -> tuple[Replay, _Found]:
        replay = Replay(plain, ranks, Judge(additions), gives_out=gives_out)
        return replay, _run_replay(replay, partial(replay.run, batch, loss_of, loss), kept, shares)

    replay, found = run(gives_out=shares)
    if not shares:
        return replay, found
    if found.first is not None or found.problem is not None:
        replay, found = run()
    stopped = found.problem is not None
    # Code may read tensors of one unit in another, past their results: layers that share keys.
    crosses = found.first is not None and found.first.what.startswith("gradient")
    crosses &= replay.has_loss  # without it the whole model's gradients are not known
    size = sum(p.numel() * p.element_size() for p in plain.model.parameters())
    if (stopped or crosses) and size <= _ALL_AT_ONCE:
        plain.join_units()
        whole = run()
        if stopped or (whole[1].first is None and whole[1].problem is None):
            return whole
    return replay, found


def _run_replay(
    replay: Replay, run: Callable[[], None], kept: list[str] | None, restores: bool
) -> _Found:
    """Run a replay, and return the findings of all ranks."""
    ranks, problem = replay.ranks, None
    ranks.compared.clear()
    try:
        with restored(replay.plain.model) if restores else nullcontext():
            run()
        ranks.meet("the end")
    except DivergedError as error:
        problem = str(error)
    except Exception as error:  # a plain module may do anything
        problem = f"{type(error).__name__}: {error}"
        with suppress(DivergedError):
            ranks.meet(problem, failed=True)
    return _gather_findings(replay.judge, problem, kept, ranks.manager)


class _Watch(TorchDispatchMode):
    """A dispatch mode that records whether any collective runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.communicates |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **kwargs or {})


def _loss(
    small: SmallBatch, loss_fn: Callable[[Any, Any], Any] | None, output: Any
) -> Tensor | None:
    """Return the loss of one process; None if loss_fn runs a collective."""
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
    return loss


class _Found(NamedTuple):
    """The differences that the ranks found, and the reason why the plain model could not run."""

    first: Finding | None  # the first difference on any rank
    then: list[str]  # other tensors that differ
    right: list[int]  # ranks that found no difference
    problem: str | None
    worst: float  # the largest error within its bound
    kept: list[str] | None  # attributes that a forward changed on any rank; see `trained`


def _gather_findings(
    judge: Judge, problem: str | None, kept: list[str] | None, manager: ProcessGroupManager
) -> _Found:
    own = judge.findings[:3], problem, judge.worst, kept
    told = all_gather_object(own, manager.world_group)
    found = sorted(
        ((each.order, rank, each) for rank, (theirs, *_) in enumerate(told) for each in theirs),
        key=lambda each: each[:2],
    )
    first = found[0][2] if found else None
    then = [each.what for _, _, each in found if first is not None and each.what != first.what]
    right = [rank for rank, (theirs, *_) in enumerate(told) if not theirs]
    problem = next((why for _, why, *_ in told if why), None)
    worst, everywhere = max(each[2] for each in told), [kept for *_, kept in told]
    names = None if None in everywhere else sorted({n for kept in everywhere for n in kept or ()})
    return _Found(first, [*dict.fromkeys(then)], right, problem, worst, names)


def _report(replay: Replay, found: _Found, terms: Terms, stage: nn.Module, seconds: float) -> None:
    """Report that the layout agrees with one process, and what could not be compared."""
    if found.problem is not None:
        terms.seen = 0  # the step itself makes the checks of a first step
        expect_attention(stage, replay.ranks.manager.pp_size == 1)
        _say(f"{terms.name} could not be rehearsed: its plain module failed ({found.problem})")
        return
    without = [*replay.unasked, *(f"hidden states of {name}" for name in replay.ranks.unjoined)]
    if found.kept is None:
        without.append("a second step, since attributes change after the first gradient")
    unasked = f"; not compared: {', '.join(without)}" if without else ""
    if get_rank() == 0:
        grid, dtype = replay.ranks.manager.grid, str(replay.ranks.dtype).removeprefix("torch.")
        sys.stderr.write(
            f"rehearsal: {len(replay.plain.units)} units on {grid} agree with one process "
            f"to {found.worst:.1e} in {dtype}, {seconds:.1f} s{unasked}\n"
        )


def _refuse(
    first: Finding,
    found: _Found,
    terms: Terms,
    manager: ProcessGroupManager,
    micro_batches: int,
    kept: Sequence[str],
) -> NoReturn:
    divided = {
        "tp": manager.tp_size > 1,
        "sequence_parallel": terms.shares_sequences,
        "cp": manager.cp_size > 1,
        "rows": manager.dp_size > 1 or micro_batches > 1,
        "pp": manager.pp_size > 1,
    }
    why = "; ".join(_ADVICE[axis] for axis, holds in divided.items() if holds)
    note = f" ({first.note})" if first.note else ""
    raise RehearsalError(
        f"{describe_rank()}: {terms.name} computes something else on {manager.grid} than in one "
        f"process: {first.what} is off by {first.error:.2g} of its size{note}, which rounding "
        "does not explain"
        + (f" (in a second step: forward keeps {listed(kept)} from call to call)" if kept else "")
        + (f"; then {', '.join(found.then[:2])}" if found.then else "")
        + (f"; right on ranks {', '.join(map(str, found.right))}" if found.right else "")
        + (f". {why}" if why else "")
        + ". The plain module is as parallelize was given it, without hooks that came later; "
        "parallelize(..., rehearse=False) leaves this comparison out"
    )


def _say(text: str) -> None:
    if get_rank() == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=4)

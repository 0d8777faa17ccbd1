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
    "sequence_parallel": "sequence parallelism divides tokens in the layers: style a module there "
    "that mixes or counts them 'sequence_whole'",
    "cp": "cp divides positions: mix them by F.scaled_dot_product_attention alone, and read the "
    "forward's argument position_ids rather than count them; positions that do not begin at 0 "
    "have to be in the batch as position_ids",
    "rows": "dp and micro-batches divide rows: compute each from that row alone",
    "pp": "pp hands hidden states and their gradients from stage to stage: what changes them "
    "between layers, as a hook does, has to be in a layer",
}
_ALL_AT_ONCE = 2**28  # bytes of a whole model that a rank may hold in addition to its shards

Step = Callable[..., Tensor]


class _Found(NamedTuple):
    """The outcome of a replay: what the ranks found, or why the plain model could not run."""

    replay: Replay
    first: Finding | None  # the first difference on any rank
    problem: str | None
    worst: float  # the largest error within its bound
    kept: list[str] | None  # attributes that a forward changed on any rank; see `trained`

    @property
    def agrees(self) -> bool:
        """True if the plain model ran, and no rank found a difference."""
        return self.first is None and self.problem is None


def rehearse_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    terms: Terms,
    manager: ProcessGroupManager,
    step: Step,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> None:
    """Train a small batch of rows by `step(micro_batches)`, and compare with the plain model."""
    began, plain, pipeline = time.perf_counter(), cast(Plain, terms.plain), pipeline_of(model)
    require_one_batch(micro_batches, manager)
    terms.looked = True
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    own = entries_added(micro_batches), *wish_for_float32(model, device)
    entries, wished, problems = zip(*all_gather_object(own, manager.world_group), strict=True)
    if None in entries:
        _say(
            f"{terms.name} is not rehearsed: its micro-batches, or entries of them, do not come "
            "from shard_global_batch"
        )
        return
    narrow = next(filter(None, problems), None) if any(wished) else ""
    added = sorted(set().union(*entries))
    if added:  # the plain run lacks these entries for the whole batch: use the loss of tokens
        loss_fn, step = None, partial(step, loss_fn=None, count_fn=None)
    cut = partial(small_batch, micro_batches, model, terms, manager)
    expect_attention(pipeline.module, False)
    plain.follow(pipeline.module, device)

    def compared(*, wide: bool, steps: int = 1) -> _Found:
        with rehearsal_mode(model, plain, terms, wide=wide), restored(plain.model):
            for _ in range(steps):
                small, loss, records, kept = trained(partial(cut, wide=wide), model, plain, step)
                ranks = Ranks(model, manager, plain, small, records, device)
                batch = {n: on_device(x, device) for n, x in small.called.items()}
                run = partial(_loss, small, loss_fn)
                found = _replay(plain, ranks, batch, run, loss, kept=kept, shares=steps == 1)
                if not found.agrees:
                    break
                model.reset()
        return found

    try:
        found = _compare_in_float32(compared, narrow)
        terms.keeps_state = found.kept != []
        kept = found.kept if found.agrees else None
        if kept:  # changed attributes may alter the next forward
            found = _compare_in_float32(partial(compared, steps=2), narrow)
    except Exception as error:
        if not added or isinstance(error, torch.OutOfMemoryError):
            raise
        why = f"reads {listed(added)}, added to micro-batches, and the loss of tokens fails"
        _say(f"{terms.name} is not rehearsed: its loss_fn {why} ({error})")
        return
    if found.first is not None:
        _refuse(found.first, terms, manager, len(micro_batches), kept)
    found.replay.unasked += [f"loss_fn, which reads {listed(added)}"] * bool(added)
    _report(found, terms, pipeline.module, time.perf_counter() - began)


def _compare_in_float32(compared: Callable[..., _Found], narrow: str | None) -> _Found:
    """Compare in float32; in the own dtype if that fails, or if `narrow` (a reason) is not None."""
    why = narrow
    if why is None:
        try:
            found = compared(wide=True)
            if found.problem is None:
                return found
            why = f"which fails ({found.problem})"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the run's own dtype may still work
            why = f"which fails ({type(error).__name__}: {error})"
    found = compared(wide=False)
    found.replay.unasked += [f"anything in float32, {why}"] * bool(why)
    return found


def _replay(
    plain: Plain,
    ranks: Ranks,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor],
    loss: Tensor,
    *,
    kept: list[str] | None,
    shares: bool,
) -> _Found:
    """Run the plain model; return the findings of all ranks.

    If `shares`, ranks first share the units; if anything differs or fails, each runs all units. If
    that fails, or gradients differ, a small model runs as a whole: its root may use the weights of
    units, and units the tensors of others. `kept` has attributes that the forward changed.
    """
    additions = chain_length(plain.model, batch["input_ids"])

    def run(*, gives_out: bool = False) -> _Found:
        replay, problem = Replay(plain, ranks, Judge(additions), gives_out=gives_out), None
        ranks.compared.clear()
        try:
            with restored(plain.model) if shares else nullcontext():
                replay.run(batch, loss_of, loss)
            ranks.meet("the end")
        except DivergedError as error:
            problem = str(error)
        except Exception as error:  # a plain module may do anything
            problem = f"{type(error).__name__}: {error}"
            with suppress(DivergedError):
                ranks.meet(problem, failed=True)
        return _gather_findings(replay, problem, kept)

    found = run(gives_out=shares)
    if not shares:
        return found
    if not found.agrees:
        found = run()
    stopped = found.problem is not None
    # Code may read tensors of one unit in another, past their results: layers that share keys.
    crosses = found.first is not None and found.first.what.startswith("gradient")
    crosses &= found.replay.has_loss  # without it the whole model's gradients are not known
    size = sum(p.numel() * p.element_size() for p in plain.model.parameters())
    if (stopped or crosses) and size <= _ALL_AT_ONCE:
        plain.join_units()
        whole = run()
        if stopped or whole.agrees:
            return whole
    return found


def _gather_findings(replay: Replay, problem: str | None, kept: list[str] | None) -> _Found:
    own = replay.judge.first, problem, replay.judge.worst, kept
    told = all_gather_object(own, replay.ranks.manager.world_group)
    firsts, problems, errors, attributes = zip(*told, strict=True)
    first = min(filter(None, firsts), key=lambda each: each.order, default=None)
    names = None if None in attributes else sorted(set().union(*attributes))
    return _Found(replay, first, next(filter(None, problems), None), max(errors), names)


def _loss(small: SmallBatch, loss_fn: Callable[[Any, Any], Any] | None, output: Any) -> Tensor:
    """Return the loss of one process."""
    batch, one = small.called.micro_batch, cast(Any, small.alone)
    if loss_fn is None:
        labels = batch["labels"].to(getattr(output, "logits", output).device)
        loss = token_loss_sum(output, labels) / max(int((labels != -100).sum()), 1)
    else:
        total, count = loss_fn(output, LossBatch(batch, None, one))
        loss = total / count
    return loss


def _report(found: _Found, terms: Terms, stage: nn.Module, seconds: float) -> None:
    """Report that the layout agrees with one process, and what could not be compared."""
    ranks = found.replay.ranks
    if found.problem is not None:
        terms.seen = 0  # the step itself makes the checks of a first step
        expect_attention(stage, ranks.manager.pp_size == 1)
        _say(f"{terms.name} could not be rehearsed: its plain module failed ({found.problem})")
        return
    without = [*found.replay.unasked, *(f"hidden states of {name}" for name in ranks.unjoined)]
    if found.kept is None:
        without.append("a second step, since attributes change after the first gradient")
    unasked = f"; not compared: {', '.join(without)}" if without else ""
    if get_rank() == 0:
        units, dtype = len(found.replay.plain.units), str(ranks.dtype).removeprefix("torch.")
        sys.stderr.write(
            f"rehearsal: {units} units on {ranks.manager.grid} agree with one process "
            f"to {found.worst:.1e} in {dtype}, {seconds:.1f} s{unasked}\n"
        )


def _refuse(
    first: Finding,
    terms: Terms,
    manager: ProcessGroupManager,
    micro_batches: int,
    kept: Sequence[str] | None,
) -> NoReturn:
    divided = {
        "tp": manager.tp_size > 1,
        "sequence_parallel": terms.shares_sequences,
        "cp": manager.cp_size > 1,
        "rows": manager.dp_size > 1 or micro_batches > 1,
        "pp": manager.pp_size > 1,
    }
    why = "; ".join(_ADVICE[axis] for axis, holds in divided.items() if holds)
    raise RehearsalError(
        f"{describe_rank()}: {terms.name} computes something else on {manager.grid} than in one "
        f"process: {first.what} is off by {first.error:.2g} of its size"
        + (f" ({first.note})" if first.note else "")
        + ", which rounding does not explain"
        + (f" (in a second step: forward keeps {listed(kept)} from call to call)" if kept else "")
        + (f". {why}" if why else "")
        + ". The plain module is as parallelize was given it, without hooks that came later; "
        "parallelize(..., rehearse=False) leaves this comparison out"
    )


def _say(text: str) -> None:
    if get_rank() == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=4)

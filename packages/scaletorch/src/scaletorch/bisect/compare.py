"""Comparison of two recorded runs, and the report of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compose.summation import ROOM
from ..dist.errors import InvalidArgumentError
from ..verify.differences import LARGEST
from .comparison.births import Birth, explain_birth, find_births
from .comparison.places import assemble, norm, pieces_of, shard_at, shardings
from .comparison.runs import Run, ancestors, load, require_comparable, unite_terms
from .comparison.verdicts import BAD, NEAR, UNSEEN, Judged, coarsest, judge_all, measure, meet
from .keys import FINAL, Key, Kind

SHOWN = 3  # births and inputs that the text names


@dataclass(frozen=True, slots=True)
class Found:
    """The place where a fault begins, with an explanation.

    Attributes:
        birth: The wrong tensor, and the tensors that it was computed from.
        how: Sentences that describe the error, surest first.
    """

    birth: Birth
    how: list[str]

    def __str__(self) -> str:
        """Return the finding in a few lines."""
        own, birth = self.birth.judged, self.birth
        where = ", ".join(name or "the model itself" for name in birth.modules[:SHOWN])
        more = f" and {len(birth.modules) - SHOWN} more" if len(birth.modules) > SHOWN else ""
        came = f"in {birth.direction}"
        if birth.direction == Kind.START:
            came = "before the step, where weights are made, loaded or divided"
        lines = [
            f"{own.key}, step {own.key.step}: off by {_figure(own.error)}, and rounding explains "
            f"{_figure(own.bound)}",
            f"  born {came}" + (f": {where}{more}" if where else ""),
        ]
        if own.wrong:
            ranks = sorted({rank for rank, _ in own.wrong})
            micro_batches = sorted({number for _, number in own.wrong})
            lines.append(f"  on ranks {ranks}, in micro-batches {micro_batches}")
        elif own.why:
            lines.append(f"  {own.why}")
        lines += [f"  {sentence}" for sentence in self.how]
        if birth.inputs:
            worst = max(birth.inputs, key=lambda each: each.error)
            count = f"{len(birth.inputs)} right tensor{'s' * (len(birth.inputs) > 1)}"
            error = f"the largest error is {_figure(worst.error)}, in {worst.key}"
            lines.append(f"  it was computed from {count}; {error}")
        if birth.others:
            named = ", ".join(str(each.key) for each in birth.others[:SHOWN]) + _dots(birth.others)
            lines.append(f"  wrong in the same way, {len(birth.others)} more: {named}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of comparing two runs.

    Attributes:
        found: The places where faults begin, in the order of the computation; none if it is sound.
        judged: The verdict on each tensor.
        notes: Further remarks, one a line.
    """

    found: list[Found]
    judged: Mapping[Key, Judged]
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """True if every result of the training was compared and agrees up to rounding."""
        return not self.found and not self.unjudged

    @property
    def unjudged(self) -> list[str]:
        """The results of the training that were not compared, each with the reason."""
        results = [each for each in self.judged.values() if each.key.kind in FINAL]
        if not any(each.key.kind == Kind.GRADIENT for each in results):
            return ["no gradient was recorded: record a backward, and the model that it trains"]
        return [f"{each.key}: {each.why}" for each in results if each.state == UNSEEN]

    def count(self, state: str) -> int:
        """Return the number of tensors in a state: GOOD, BAD or UNSEEN."""
        return sum(each.state == state for each in self.judged.values())

    def __str__(self) -> str:
        """Return the findings, the summary and the notes."""
        lines = [f"{number + 1}. {each}" for number, each in enumerate(self.found[:SHOWN])]
        if len(self.found) > SHOWN:
            lines.append(f"and {len(self.found) - SHOWN} more in the same step")
        if not self.found and (unjudged := self.unjudged):
            first = "; ".join(unjudged[:SHOWN]) + _dots(unjudged)
            lines = [f"not judged, {len(unjudged)} of the training's results: {first}"]
        return "\n".join([*lines, self.summary(), *self.notes])

    def summary(self) -> str:
        """Return one line with the numbers of tensors that were compared and that are wrong."""
        total, unseen = len(self.judged), self.count(UNSEEN)
        text = f"{total - unseen} tensors compared"
        if unseen:
            reason = next(e for e in self.judged.values() if e.state == UNSEEN)
            text += f", {unseen} not ({reason.key}: {reason.why}{', …' if unseen > 1 else ''})"
        if not self.found:
            text += f" ({len(self.unjudged)} results among them)" * bool(self.unjudged)
            return f"{text}: no result of the training differs by more than rounding explains"
        return f"{text}; {self.count(BAD)} are wrong: born wrong, or computed from a wrong one"


def _figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "all of it"


def _dots(items: Sequence[Any]) -> str:
    return ", …" if len(items) > SHOWN else ""


def compare(reference: str | Path, run: str | Path, *, noise: str | Path | None = None) -> Report:
    """Find the first tensor that differs between two recorded runs of the same model and batch.

    Args:
        reference: The folder of the run that is right: one process in float64, or another layout,
            version of the code or version of torch.
        run: The folder of the run in question.
        noise: The folder of the reference in the run's dtype, or in another dtype below float64. It
            shows the rounding error of each tensor; needed for bfloat16.

    Returns:
        The report; `report.sound` if no result differs by more than rounding explains.

    Raises:
        InvalidArgumentError: A folder has no recording, an incomplete one, or lacks some ranks; the
            runs are of different models; or rounding alone would hide faults.
    """
    theirs, ours = load(reference), load(run)
    lost = measure(load(noise), theirs) if noise is not None else {}
    require_comparable(theirs, ours)
    return compare_runs(theirs, ours, lost)


def compare_runs(reference: Run, run: Run, lost: Mapping[Key, float]) -> Report:
    """Find the first tensor that differs between two loaded runs; `lost` is as for `judge_all`."""
    chain = chain_of(reference)
    eps = max(coarsest(run), coarsest(reference))
    if not lost and eps * ROOM * math.sqrt(chain) > LARGEST:
        raise InvalidArgumentError(
            f"rounding of {chain} additions at an epsilon of {eps:.0e} could hide faults: record "
            "one process in float64 as the reference, and one in this dtype as `noise`"
        )
    for each in (reference, run):
        unite_terms(each, reference)
    infer_weight(run, reference)
    ancestry = ancestors(reference)
    judged = judge_all(run, reference, ancestry, lost, chain)
    births = find_births(judged, run, reference, ancestry)
    found = [Found(birth, explain_birth(birth, run, reference)) for birth in births]
    return Report(found, judged)


def chain_of(run: Run) -> int:
    """Return the largest number of additions between inputs and results.

    Each weight matrix adds its two sizes; attention and the loss add the batch's tokens.
    """
    sizes = tokens = 0
    for key, held in run.held.items():
        shape = held[0].line.shape
        if key.kind == Kind.GRADIENT and len(shape) > 1:
            sizes += sum(shape) * len({each.recording.rank for each in held})
        elif not tokens and key.kind in (Kind.FORWARD, Kind.DATA):
            tokens = sum(math.prod(each.line.shape[:2]) for each in held)
    return sizes + 2 * tokens


def infer_weight(run: Run, reference: Run) -> None:
    """Note the factor by which all gradients of activations differ, as `Description.weight`.

    DDP and FSDP2 average gradients over ranks, so some programs multiply the loss by the number of
    ranks. The factor, an integer or its inverse, is that of the gradient nearest to the loss. None
    is noted if the loss is wrong, or if ranks describe their weights, or do not shard the batch.
    """
    for step, recordings in run.steps.items():
        loss = meet(Key(step, Kind.LOSS, ""), run, reference)
        described = all(each.header["weight"] is not None for each in recordings)
        has_shards = any(each.header["axes"] for each in recordings)
        shared = (k for k in reference.held if k.step == step and k.kind == Kind.BACKWARD)
        first = next((key for key in shared if key in run.held), None)
        if first is None or described or not has_shards or (loss and loss.error > NEAR):
            continue
        for recording in recordings:
            recording.header["weight"] = 1 / _factor(first, run, reference)


def _factor(key: Key, run: Run, reference: Run) -> float:
    """Return the integer factor, or its inverse, by which all shards differ; 1 if there is none."""
    ours, theirs = run.held[key], reference.held[key]
    for dims in shardings([*theirs, *ours]):
        whole = assemble(pieces_of(theirs, dims), dims)
        pieces = [p for p in pieces_of(ours, dims) if p.tensor.any()]  # zeros have no factor
        pairs = [(p.tensor.double(), shard_at(whole, p).double()) for p in pieces]
        ratio = next((norm(a) / norm(b) for a, b in pairs if norm(b)), 1.0)
        if NEAR < ratio < 1 / NEAR:  # not NaN or infinite
            factor = round(ratio) if ratio > 1 else 1 / round(1 / ratio)
            if all(norm(a - factor * b) <= NEAR * factor * norm(b) for a, b in pairs):
                return factor
    return 1.0

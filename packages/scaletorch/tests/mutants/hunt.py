"""The hunt: is every fault found, where, and by which tensor?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scaletorch.dist.building import locate
from scaletorch.dist.testing import preload
from scaletorch.parallel.tensor_parallel import Plan
from scaletorch.verify.cases import Case
from scaletorch.verify.differences import Difference
from scaletorch.verify.problem import BatchFn, ModelFn, Subject, default_batch, default_model
from scaletorch.verify.report import CaseResult
from scaletorch.verify.runner import RankReport, run_case
from scaletorch.verify.verify import Task, run_all, save_reference

from .context_faults import CONTEXT
from .data_faults import DATA
from .expert_faults import AROUND, EXPERTS
from .mutant import Mutant
from .pipeline_faults import PIPELINE
from .routed import ROUTED_PLAN, Idle, Routed, Skewed
from .router_faults import ORDER, ROUTERS
from .specimen import PLAN, Sharded, Shared, Specimen, Staged, batch
from .tensor_faults import SUMS, TENSOR
from .whole_faults import WHOLE

MUTANTS: Mapping[str, Mutant] = {
    mutant.name: mutant
    for catalogue in (TENSOR, SUMS, CONTEXT, PIPELINE, DATA, WHOLE, EXPERTS, AROUND, ROUTERS, ORDER)
    for mutant in catalogue.mutants
}
MODELS: Mapping[str, tuple[ModelFn, Plan | None, BatchFn]] = {
    "specimen": (Specimen, PLAN, batch),
    "staged": (Staged, PLAN, batch),
    "shared": (Shared, PLAN, batch),
    "sharded": (Sharded, {}, batch),
    "routed": (Routed, ROUTED_PLAN, batch),
    "skewed": (Skewed, ROUTED_PLAN, batch),
    "idle": (Idle, ROUTED_PLAN, batch),
    "built-in": (default_model, None, default_batch),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    sound: CaseResult  # of the same case without the fault
    found: CaseResult

    @property
    def caught(self) -> bool:
        """Whether the fault alone makes the case fail, by the name of a tensor."""
        return self.sound.passed and bool(self.evidence)

    @property
    def evidence(self) -> list[Difference]:
        """What failed first and furthest, on the lowest rank of those that saw it first."""
        seeing = [rank.failures for rank in self.found.ranks if rank.failures]
        return min(seeing, key=lambda failures: failures[0].step, default=[])

    def __str__(self) -> str:
        """Say by which tensor it was caught, or what happened instead."""
        if not self.sound.passed:
            return f"fails without the fault: {self.sound.explanation('')}"
        if not self.evidence:
            return self.found.error or "nothing differs"
        first, shown = self.evidence[0], [f"{e.what} ({e.error:.1e})" for e in self.evidence[:2]]
        return f"step {first.step}, rank {first.rank}: {', '.join(shown)}"


def hunt(
    mutants: Iterable[Mutant] | None = None,
    *,
    timeout: float = 60.0,
    progress: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Put each fault into the library, verify its case, and return what was found."""
    chosen = list(MUTANTS.values() if mutants is None else mutants)
    # Each case runs without a fault first; ranks last as long as their number is the same.
    jobs = [Job(*key, None) for key in dict.fromkeys((m.model, m.case) for m in chosen)]
    jobs += [Job(mutant.model, mutant.case, mutant) for mutant in chosen]
    jobs.sort(key=lambda job: job.case.grid.world_size)
    preload("torch._dynamo")
    sound: dict[tuple[str, Case], CaseResult] = {}
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="scaletorch-mutants-") as folder:
        results = run_all(_tasks(jobs, Path(folder)), timeout)
        for (model, case, mutant), result in zip(jobs, results, strict=True):
            if mutant is None:
                sound[model, case] = result
            else:
                outcomes.append(Outcome(mutant, sound[model, case], result))
                progress(outcomes[-1])
    return outcomes


class Job(NamedTuple):
    """A case of a model, with a fault or without."""

    model: str
    case: Case
    mutant: Mutant | None


def _tasks(jobs: Iterable[Job], folder: Path) -> list[Task]:
    references: dict[tuple[str, str], str] = {}
    tasks = []
    for model, case, mutant in jobs:
        model_fn, plan, batch_fn = MODELS[model]
        key = model, case.dtype
        subject = Subject(locate(model_fn), plan)
        if key not in references:
            references[key] = save_reference(folder / "-".join(key), subject, batch_fn, case.dtype)
        name = None if mutant is None else mutant.name
        tasks.append(Task(case, run_mutant, (subject, references[key], name)))
    return tasks


def run_mutant(case: Case, subject: Subject, reference: str, name: str | None) -> RankReport:
    """Run a case as one rank, with a mutant's fault in the library where one is named."""
    if name is None:
        return run_case(case, subject, reference)
    with MUTANTS[name].apply():
        return run_case(case, subject, reference)


def to_markdown(outcomes: Iterable[Outcome]) -> str:
    """Return a table of faults, where each shows, and by which tensor."""
    lines = ["| mutant | fault | case | seen by |", "| --- | --- | --- | --- |"]
    for outcome in outcomes:
        mutant = outcome.mutant
        seen = ", ".join(f"`{each.what}`" for each in outcome.evidence[:2])
        place = f"{seen}, step {outcome.evidence[0].step}" if outcome.caught else "**survives**"
        lines.append(f"| {mutant.name} | {mutant.fault} | {mutant.case} | {place} |")
    return "\n".join(lines) + "\n"

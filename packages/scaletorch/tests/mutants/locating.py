"""Is every planted fault located: the module and the direction in which it was born?"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from scaletorch.bisect import Report
from scaletorch.bisect.locate import PlainRun, locate, prepare, record_case
from scaletorch.dist.building import locate as locator
from scaletorch.dist.testing import preload
from scaletorch.verify.cases import Case
from scaletorch.verify.problem import STEPS, Subject
from scaletorch.verify.verify import reused_ranks

from .hunt import MODELS, MUTANTS
from .mutant import Mutant

ELSEWHERE, NAMED = " (wrong)", "by the proof"
OF_PARAMETERS = ("gradient", "weight")
DIRECTIONS = ("start", "forward", "backward", "synchronisation", "update", "data")


def locate_all(
    mutants: Iterable[Mutant] | None = None,
    *,
    steps: int = STEPS,
    timeout: float = 60.0,
    progress: Callable[[Mutant, Report], None] = lambda *_: None,
) -> dict[str, Report]:
    """Put each fault into the library, and return a report for each mutant by its name."""
    seen = (each for each in mutants or MUTANTS.values() if each.born)
    chosen = sorted(seen, key=lambda each: each.case.grid.world_size)
    preload("torch._dynamo")
    prepared: dict[tuple[str, str], PlainRun] = {}
    found: dict[str, Report] = {}
    place = tempfile.TemporaryDirectory(prefix="scaletorch-located-")
    with place as folder, reused_ranks(timeout) as pool_of:
        for mutant in chosen:
            model_fn, plan, batch_fn = MODELS[mutant.model]
            case, key = mutant.case, (mutant.model, mutant.case.dtype)
            subject, own = Subject(locator(model_fn), plan), Path(folder, mutant.name)
            if key not in prepared:
                plain = Path(folder, "-".join(key))
                prepared[key] = prepare(plain, subject, batch_fn, case.dtype, steps)
            pool, told = pool_of(case.grid.world_size), (record_mutant, mutant.name)
            found[mutant.name] = locate(case, subject, prepared[key], pool, own, *told)
            shutil.rmtree(own)
            progress(mutant, found[mutant.name])
    return found


def record_mutant(
    case: Case, subject: Subject, reference: str, folder: str, steps: int, name: str
) -> list[float]:
    """Record a case as one rank, with a mutant's fault in the library."""
    with MUTANTS[name].apply():
        return record_case(case, subject, reference, folder, steps)


def is_located(mutant: Mutant, report: Report) -> bool:
    """Return whether the first birth of a report is where the fault is."""
    if not report.found:
        return False
    birth = report.found[0].birth
    every = [each.key for each in (birth.judged, *birth.others)]
    parameters = [key.name for key in every if key.kind in OF_PARAMETERS]
    return matches(mutant.born, birth.direction, birth.modules, parameters)


def place_of(report: Report) -> str:
    """Return where a report says that a fault is born, for a table."""
    if not report.found:
        return "nowhere"
    birth = report.found[0].birth
    named = [name or "the model" for name in birth.modules[:2]]
    named = named or ([] if birth.others else [birth.judged.key.name])
    return f"{birth.direction}: {', '.join(named) or 'gradients'}"


def with_places(table: str, reports: Mapping[str, Report]) -> str:
    """Return a table of mutants with a column more: where each was located, right or wrong."""
    lines = table.splitlines()
    names = [line.split(" | ")[0][2:] for line in lines[2:]]
    places = (
        place_of(reports[name]) + ("" if is_located(MUTANTS[name], reports[name]) else ELSEWHERE)
        if MUTANTS[name].born
        else NAMED
        for name in names
    )
    added = ["located", "---", *places]
    return "\n".join(f"{line} {cell} |" for line, cell in zip(lines, added, strict=True)) + "\n"


def matches(born: str, direction: str, modules: Sequence[str], parameters: Sequence[str]) -> bool:
    """Return whether a report leads to where a fault is born, and nowhere else.

    `born` is such as `"backward: *.q_norm | *.k_norm ; update: norm"`: directions, each with
    patterns over names of the plain model ('model' is its own code) or words: 'loss' for the loss
    behind it, 'gradients' for those of any parameter, 'norm', 'clip' and 'weights' of an update,
    and entries of the batch. Directions: 'start' for a weight before the step, 'forward' for an
    output of right inputs, 'backward' for a gradient of right ones, 'synchronisation' for the sum
    of ranks' right gradients, 'update' for what is made of these, 'data' for a rank's batch.
    `direction`, `modules` and `parameters` are the report's.
    """
    if not modules and not parameters:
        return False
    for place in born.split(";"):
        where, _, listed = place.partition(":")
        patterns = [pattern.strip() for pattern in listed.split("|")]
        if where.strip() != direction:
            continue
        if modules and all(_is_one_of(name or "model", patterns) for name in modules):
            return True
        if parameters and all(_has_one_of(name, patterns) for name in parameters):
            return True
    return False


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _has_one_of(parameter: str, patterns: Sequence[str]) -> bool:
    module = parameter.rpartition(".")[0] or "model"
    return "gradients" in patterns or any(_is_one_of(n, patterns) for n in (parameter, module))

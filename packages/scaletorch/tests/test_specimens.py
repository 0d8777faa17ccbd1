"""The models that faults are tried on are sound on every layout and under every option."""

from random import Random

import pytest
from mutants.routed import ROUTED_PLAN, Routed
from mutants.specimen import PLAN, Shared, Specimen, Staged, StagedShared, batch
from sweeps import today

from scaletorch.dist.ranks.locate import locate
from scaletorch.verify import parse_layout
from scaletorch.verify.cases import OPTIONS, enumerate_cases
from scaletorch.verify.problem import Subject
from scaletorch.verify.runner import run_case
from scaletorch.verify.verify import Task, run_all, save_reference

LAYOUTS = ["2x1x1x2", "1x2x2x1", "2x2x1x1", "1x1x2x2"]  # each axis is in two
DRAWN = 8  # combinations of all options, of each layout
NESTED = {"sequence_parallel": "on", "recompute": "layers", "data_parallel": "zero2"}


def of_length(layout):
    """The specimens of a layout, for whole sequences and for shares of them."""
    return (Staged, StagedShared) if parse_layout(layout).pp > 1 else (Specimen, Shared)


def cases_of(layout, chosen):
    """The cases that options give on a layout, without what cannot matter to it."""
    grids = [parse_layout(layout)]
    crossed = [{name: [value] for name, value in each.items()} for each in chosen]
    cases = [case for each in crossed for case in enumerate_cases(grids, ["float64"], each)]
    return list(dict.fromkeys(cases))


def every_value(layout):
    """Every value of every option once beside the others' defaults, and drawn combinations."""
    random, items = Random(layout), OPTIONS.items()
    chosen = [{name: value} for name, values in items for value in values]
    chosen += [{name: random.choice(values) for name, values in items} for _ in range(DRAWN)]
    cases = cases_of(layout, chosen)
    for name, values in items:
        tried = {getattr(case, name) for case in cases}
        assert len(tried) == 1 or tried == set(values)
    return cases


def arguments_of(model, folder):
    """Return what cases of a model take: the model with its plan, and one process's figures."""
    subject = Subject(locate(model), ROUTED_PLAN if model is Routed else PLAN)
    return subject, save_reference(folder / model.__name__, subject, batch, "float64")


def every_case():
    """Return each model with its cases: all values of options, shares of sequences, experts."""
    found = []
    for layout in LAYOUTS:
        models = dict(zip(("off", "on"), of_length(layout), strict=True))
        found += [(models[case.sequence_parallel], case) for case in every_value(layout)]
    shares = {"sequence_parallel": "on", "recompute": "layers", "loss_parallel": "on"}
    for layout in ("1x1x1x2", "1x3x1x2", "2x1x1x2", "1x1x2x2"):
        found += [(of_length(layout)[1], case) for case in cases_of(layout, [shares])]
    for layout in ("2x1x1x2-ep2", "1x2x1x2-ep2", "1x1x2x2-ep4"):
        # Options alone where that is quickest, everywhere none of them and all together.
        single = [{name: value} for name, value in NESTED.items()] * (layout == "2x1x1x2-ep2")
        found += [(Routed, case) for case in cases_of(layout, [{}, *single, NESTED])]
    return found


@pytest.mark.timeout(300)
def test_specimens_are_sound(tmp_path):
    cases = today(every_case(), 40)
    arguments = {model: arguments_of(model, tmp_path) for model in {model for model, _ in cases}}
    tasks = [Task(case, run_case, arguments[model]) for model, case in cases]
    results = list(run_all(tasks, 60))
    assert len(results) == len(tasks) > 0
    assert [result.explanation("") for result in results if not result.passed] == []

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

# Each axis is in one layout of either list.
ALONE = ["2x1x1x2", "1x2x2x1"]  # here every value of every option is tried beside defaults
TOGETHER = ["2x2x1x1", "1x1x2x2"]  # here each is, too, in cases that have several
DRAWN = 4  # combinations of all options, of each layout
ROWS = 8  # cases in which every value comes, as many as the longest option has, and one
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


def alone(random):
    """Every value of every option once beside the others' defaults, and drawn combinations."""
    chosen = [{name: value} for name, values in OPTIONS.items() for value in values]
    return chosen + [drawn(random) for _ in range(DRAWN)]


def drawn(random):
    return {name: random.choice(values) for name, values in OPTIONS.items()}


def together(random):
    """All defaults, and rows in which every value comes once, and defaults in what is left."""
    columns = []
    for values in OPTIONS.values():
        columns.append([*values, *values[:1] * (ROWS - len(values))])
        random.shuffle(columns[-1])
    return [{}, *(dict(zip(OPTIONS, row, strict=True)) for row in zip(*columns, strict=True))]


def every_value(layout):
    """Cases that have every value of every option that can matter to a layout."""
    cases = cases_of(layout, (alone if layout in ALONE else together)(Random(layout)))
    assert len(cases) > ROWS
    for name, values in OPTIONS.items():
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
    for layout in ALONE + TOGETHER:
        models = dict(zip(("off", "on"), of_length(layout), strict=True))
        found += [(models[case.sequence_parallel], case) for case in every_value(layout)]
    shares = {"sequence_parallel": "on"}
    for layout in ("1x1x1x2", "1x3x1x2", "2x1x1x2", "1x1x2x2"):
        chosen = [shares | {"recompute": "layers", "loss_parallel": "on"}]
        chosen += [shares] * (layout not in ALONE)  # where that is a case of every value
        found += [(of_length(layout)[1], case) for case in cases_of(layout, chosen)]
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

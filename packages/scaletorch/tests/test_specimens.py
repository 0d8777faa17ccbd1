"""The models that faults are tried on are sound on every layout and under every option."""

from random import Random

import pytest
from mutants.routed import ROUTED_PLAN, Routed
from mutants.specimen import PLAN, Shared, Specimen, batch

from scaletorch.dist.ranks.locate import locate
from scaletorch.verify import parse_layout
from scaletorch.verify.cases import OPTIONS, enumerate_cases
from scaletorch.verify.runner import run_case
from scaletorch.verify.training import Subject
from scaletorch.verify.verify import Task, run_all, save_reference

DRAWN = 4  # combinations of all options, of each layout
NESTED = {"sequence_parallel": "on", "recompute": "layers", "data_parallel": "zero2"}


class ShortSpecimen(Specimen):
    """For layouts without stages, which look at layers one by one: a first, an inner, a last."""

    depth = 3


class ShortShared(Shared):
    """The same for sequence parallelism."""

    depth = 3


class ShortRouted(Routed):
    """The same with experts."""

    depth = 3


def of_length(layout):
    """The specimens of a layout: for whole sequences, for shares of them, and with experts."""
    staged = parse_layout(layout).pp > 1
    return (Specimen, Shared, Routed) if staged else (ShortSpecimen, ShortShared, ShortRouted)


def cases_of(layout, chosen):
    """The cases that options give on a layout, without what cannot matter to it."""
    grids = [parse_layout(layout)]
    crossed = [{name: [value] for name, value in each.items()} for each in chosen]
    cases = [case for each in crossed for case in enumerate_cases(grids, ["float64"], each)]
    return list(dict.fromkeys(cases))


def every_value(layout):
    """Every value of every option once beside the others' defaults, and drawn combinations."""
    random = Random(layout)
    chosen = [{name: value} for name, values in OPTIONS.items() for value in values]
    chosen += [{n: random.choice(values) for n, values in OPTIONS.items()} for _ in range(DRAWN)]
    return cases_of(layout, chosen)


def unsound(folder, model, plan, cases):
    """Train on each layout, and tell where that differs from one process."""
    reference = save_reference(folder / model.__name__, model, batch, "float64")
    arguments = Subject(locate(model), plan, None), reference
    results = list(run_all([Task(case, run_case, arguments) for case in cases], 60))
    assert len(results) == len(cases) > 0
    return [result.explanation("") for result in results if not result.passed]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["2x1x1x2", "1x2x2x1", "2x2x1x1", "1x1x2x2"])
def test_every_value_of_every_option(layout, tmp_path):
    cases = every_value(layout)
    assert len(cases) > DRAWN
    for name, values in OPTIONS.items():
        tried = {getattr(case, name) for case in cases}
        assert len(tried) == 1 or tried == set(values)
    for model, sequences in zip(of_length(layout)[:2], ("off", "on"), strict=True):
        own = [case for case in cases if case.sequence_parallel == sequences]
        assert not own or not unsound(tmp_path, model, PLAN, own)


@pytest.mark.parametrize("layout", ["1x1x1x2", "1x3x1x2", "2x1x1x2", "1x1x2x2"])
def test_shares_of_sequences(layout, tmp_path):
    shares = {"sequence_parallel": "on"}
    chosen = [shares, shares | {"recompute": "layers"}, shares | {"loss_parallel": "on"}]
    assert not unsound(tmp_path, of_length(layout)[1], PLAN, cases_of(layout, chosen))


@pytest.mark.parametrize("layout", ["2x1x1x2-ep2", "1x2x1x2-ep2", "1x1x2x2-ep4"])
def test_experts(layout, tmp_path):
    chosen = [{}, *({name: value} for name, value in NESTED.items()), NESTED]
    assert not unsound(tmp_path, of_length(layout)[2], ROUTED_PLAN, cases_of(layout, chosen))

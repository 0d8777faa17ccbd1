"""Every fault that is put into the library is found by the proof, which is sound without it."""

from random import Random

import pytest
from mutants import MUTANTS, hunt, to_markdown
from mutants.patch import patched
from mutants.routed import ROUTED_PLAN, Routed
from mutants.specimen import PLAN, Shared, Specimen, batch

from scaletorch.dist import functional
from scaletorch.dist.ranks.locate import locate
from scaletorch.verify import parse_layout, verify
from scaletorch.verify.cases import OPTIONS, enumerate_cases
from scaletorch.verify.runner import run_case
from scaletorch.verify.training import Subject
from scaletorch.verify.verify import Task, run_all, save_reference


@pytest.mark.timeout(300)
def test_every_fault_is_found_by_name():
    outcomes = hunt()
    assert len(outcomes) == len(MUTANTS) >= 30
    survivors = [f"{each.mutant.name}: {each}" for each in outcomes if not each.caught]
    assert not survivors, "\n".join(survivors)
    table = to_markdown(outcomes)
    assert table.count("\n") == len(MUTANTS) + 2
    assert "survives" not in table


DRAWN = 12  # combinations of all options, of each layout


def cases_of(layout):
    """Every value of every option once beside the others' defaults, and drawn combinations."""
    random, grid = Random(layout), parse_layout(layout)
    chosen = [{name: value} for name, values in OPTIONS.items() for value in values]
    chosen += [{n: random.choice(values) for n, values in OPTIONS.items()} for _ in range(DRAWN)]
    crossed = [{name: [value] for name, value in each.items()} for each in chosen]
    cases = [case for each in crossed for case in enumerate_cases([grid], ["float64"], each)]
    return list(dict.fromkeys(cases))  # without what cannot matter to the layout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["2x1x1x2", "1x2x2x1", "2x2x1x1", "1x1x2x2"])
def test_the_specimen_itself_is_sound_under_every_value_of_every_option(layout, tmp_path):
    tasks, cases = [], cases_of(layout)
    for name, values in OPTIONS.items():
        tried = {getattr(case, name) for case in cases}
        assert len(tried) == 1 or tried == set(values)
    for model, sequences in ((Specimen, "off"), (Shared, "on")):
        reference = save_reference(tmp_path / sequences, model, batch, "float64")
        arguments = Subject(locate(model), PLAN, None), reference
        own = [case for case in cases if case.sequence_parallel == sequences]
        tasks += [Task(case, run_case, arguments) for case in own]
    results = list(run_all(tasks, 60))
    assert len(results) == len(cases) > DRAWN
    unsound = [result.explanation("") for result in results if not result.passed]
    assert not unsound, "\n".join(unsound)


@pytest.mark.parametrize("layout", ["1x1x1x2", "1x3x1x2", "2x1x1x2", "1x1x2x2"])
def test_shares_of_sequences_are_sound(layout):
    options = {
        "sequence_parallel": ("on",),
        "recompute": ("none", "layers"),
        "loss_parallel": ("off", "on"),
    }
    grids = [parse_layout(layout)]
    report = verify(Shared, batch, layouts=grids, dtype="float64", plan=PLAN, options=options)
    assert report.passed, report


@pytest.mark.parametrize("layout", ["2x1x1x2-ep2", "1x2x1x2-ep2", "1x1x2x2-ep4"])
def test_experts_are_sound(layout):
    options = {
        "sequence_parallel": ("off", "on"),
        "recompute": ("none", "layers"),
        "data_parallel": ("buckets", "zero2"),
    }
    grids = [parse_layout(layout)]
    report = verify(
        Routed, batch, layouts=grids, dtype="float64", plan=ROUTED_PLAN, options=options
    )
    assert report.passed, report


def test_a_fault_goes_as_it_came():
    before = functional.Copy.backward
    with patched("dist.functional:Copy.backward", lambda original: lambda *_: "faulty"):
        assert functional.Copy.backward() == "faulty"
    assert functional.Copy.backward is before


def test_every_target_exists():
    for mutant in MUTANTS.values():
        with mutant.apply():
            pass


def test_an_unsound_or_surviving_mutant_is_not_counted_as_caught():
    harmless = next(m for m in MUTANTS.values() if m.case.grid.world_size == 2)
    (outcome,) = hunt([harmless])
    assert outcome.caught
    survivor = type(outcome)(outcome.mutant, outcome.sound, outcome.sound)
    assert not survivor.caught
    assert str(survivor) == "nothing differs"
    assert "**survives**" in to_markdown([survivor])
    assert not type(outcome)(outcome.mutant, outcome.found, outcome.found).caught

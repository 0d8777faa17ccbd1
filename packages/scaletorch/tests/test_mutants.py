"""Every fault that is put into the library is found by the proof, which is sound without it."""

import pytest

from scaletorch.dist import functional
from scaletorch.verify import parse_layout, verify
from scaletorch.verify.cases import OPTIONS
from scaletorch.verify.mutants import MUTANTS, hunt, to_markdown
from scaletorch.verify.mutants.patch import patched
from scaletorch.verify.mutants.specimen import PLAN, Shared, Specimen, batch


@pytest.mark.timeout(300)
def test_every_fault_is_found_by_name():
    outcomes = hunt()
    assert len(outcomes) == len(MUTANTS) >= 30
    survivors = [f"{each.mutant.name}: {each}" for each in outcomes if not each.caught]
    assert not survivors, "\n".join(survivors)
    table = to_markdown(outcomes)
    assert table.count("\n") == len(MUTANTS) + 2
    assert "survives" not in table


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["2x1x1x2", "1x2x2x1", "2x2x1x1", "1x1x2x2"])
def test_the_specimen_itself_is_sound_under_every_option(layout):
    options = {**OPTIONS, "bucket_size": (1, 2**24)}
    options |= {"sequence_parallel": ("off",), "micro_batches": (2,)}
    options |= {"cp_layout": ("contiguous",), "cp_method": ("ring",)}
    grids = [parse_layout(layout)]
    report = verify(Specimen, batch, layouts=grids, dtype="float64", plan=PLAN, options=options)
    assert report.passed, report


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

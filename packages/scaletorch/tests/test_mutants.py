"""Every fault that is put into the library is found by the proof, and counted as it should be."""

from dataclasses import replace

import pytest
from mutants import MUTANTS, hunt, to_markdown
from mutants.patch import patched
from sweeps import today

from scaletorch.dist import functional


@pytest.mark.timeout(300)
def test_every_fault_is_found_by_name():
    assert len(MUTANTS) >= 30
    every = sorted(MUTANTS.values(), key=lambda each: (each.model, str(each.case)))
    tens = [every[at : at + 10] for at in range(0, len(every), 10)]  # few cases without a fault
    mutants = [each for ten in today(tens, len(tens)) for each in ten]
    outcomes = hunt(mutants)
    assert len(outcomes) == len(mutants)
    survivors = [f"{each.mutant.name}: {each}" for each in outcomes if not each.caught]
    assert not survivors, "\n".join(survivors)
    table = to_markdown(outcomes)
    assert table.count("\n") == len(mutants) + 2
    assert "survives" not in table
    caught = outcomes[0]
    survivor = replace(caught, found=caught.sound)
    assert not survivor.caught
    assert str(survivor) == "nothing differs"
    assert "**survives**" in to_markdown([survivor])
    assert not replace(caught, sound=caught.found).caught  # a case that fails without a fault


def test_a_fault_goes_as_it_came():
    before = functional.AllToAll.forward
    with patched("dist.functional:AllToAll.forward", lambda original: lambda *_: "faulty"):
        assert functional.AllToAll.forward() == "faulty"
    assert functional.AllToAll.forward is before


def test_every_target_exists():
    for mutant in MUTANTS.values():
        with mutant.apply():
            pass

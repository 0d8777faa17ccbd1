"""Some modules of the generator on random layouts, each day others; and what the generator sees."""

import contextlib
import time
from unittest import mock

import pytest
import torch
from tools.families.verdicts import OBSCURE, Verdict
from tools.modules import layouts, recipe
from tools.modules.cell import Told, cell
from tools.modules.model import make
from tools.modules.run import Runner, Setting, layouts_of
from tools.modules.verdicts import (
    FALSE,
    FAULTS,
    FOUND,
    REFUSED,
    RIGHT,
    SILENT,
    UNSEEN,
    WARNED,
    after,
    of_ranks,
    reason,
)

MODULES = 2  # a day
TODAY = int(time.time() // 86400) * MODULES


@pytest.fixture(scope="module")
def runner():
    runner = Runner()
    with contextlib.closing(runner.pools):
        yield runner


@pytest.mark.timeout(300)
def test_some_modules(runner):
    settings = [
        Setting(recipe.draw(seed), seed, layout)
        for seed in range(TODAY, TODAY + MODULES)
        for layout in layouts_of(seed, 2)
    ]
    found = [(setting, runner.run(setting)) for setting in settings]
    assert any(verdict.word == RIGHT for _, verdict in found)
    faults = [
        f"{verdict.word}: {verdict.words}\n    {setting.again(drawn=True)}"
        for setting, verdict in found
        if verdict.word in FAULTS
    ]
    assert not faults, "\n".join(faults)


def without_sums(*args, **kwargs):
    """Leave out the sum over tp of gradients of parameters in regions."""
    with mock.patch("scaletorch.compose.gradients._sum"):
        return cell(*args, **kwargs)


def test_a_sum_that_is_left_out_is_seen(runner):
    setting = Setting(recipe.parsed(["head_norm=rms"]), 3, layouts.parsed("tp2"))
    assert runner.run(setting).word == RIGHT
    with mock.patch("tools.modules.run.cell", without_sums):
        assert runner.run(setting).word == FOUND


def test_an_error_that_is_no_refusal_is_obscure(runner):
    setting = Setting(recipe.parsed([]), 3, layouts.parsed("dp2"))
    with mock.patch("tools.modules.run.cell", int):
        assert runner.run(setting).word == OBSCURE
    assert runner.run(setting).word == RIGHT  # on new ranks


def test_a_seed_says_all():
    for seed in range(60):
        drawn = recipe.draw(seed)
        assert recipe.parsed(recipe.shown(drawn).split()) == drawn
        for layout in layouts_of(seed, 3):
            assert layouts.parsed(layouts.shown(layout)) == layout
    one, other = (make(recipe.draw(7), 7, 2).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="mlp is one of gated plain"):
        recipe.parsed(["mlp=none_such"])
    with pytest.raises(ValueError, match="'tp' is no word of a layout"):
        layouts.parsed("tp")


def test_what_ranks_say_together():
    right, refused = Told("right", "", 1e-15), Told("refused", "InvalidArgumentError: no. b")
    heard = Told("refused", "MismatchError: another rank failed")
    wrong, warned = Told("wrong", "loss", 0.1), Told("wrong", "loss", 0.1, ("look",))
    assert of_ranks([right, right]).word == RIGHT
    assert of_ranks([heard, refused]) == Verdict(REFUSED, words=refused.words)
    assert of_ranks([right, refused]).word == OBSCURE
    assert of_ranks([right, wrong]) == Verdict(SILENT, 0.1, "loss")
    assert of_ranks([wrong, warned]).word == WARNED
    unseen = Told("right", "", 1e-15, ("not compared: layers.0",))
    assert of_ranks([right, unseen]).word == UNSEEN
    rehearsal = of_ranks([Told("rehearsal", "differs")] * 2)
    assert rehearsal.word == FOUND
    assert after(rehearsal, Verdict(RIGHT)).word == FALSE
    assert reason("E: rank 1 (dp0): module 'a.b' of [3, 4] fails") == "E: module _ of _ fails"

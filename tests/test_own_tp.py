"""Families under transformers' own tensor parallelism: `bisect` says what the page says.

A few of them, each day others, and one that is wrong.
"""

import pytest
import torch

pytest.importorskip("transformers")

from sweeps import today
from tools.families.own_tp import page, ranks
from tools.families.own_tp.record import read
from tools.families.own_tp.run import families, judge
from tools.families.own_tp.verdicts import RIGHT, WRONG, Family, Judgement
from tools.groups import own_groups

from scaletorch import bisect
from scaletorch.dist.testing import run_ranks

SHARES = 32  # of the families, one a day; `hatch run own-tp` tries all
KNOWN = read()["families"]
TRIED = [name for name, family in KNOWN.items() if family.by_dtype]
BUGS = [name for name in TRIED if not KNOWN[name].is_right]


def said(family):
    """Return the words for each dtype, and of what is wrong the tensor and the place."""
    return {
        dtype: (each.word, each.words.partition(":")[0] * (each.word == WRONG), each.born)
        for dtype, each in family.by_dtype.items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", today(range(SHARES), SHARES))
def test_they_are_reported_as_the_page_says(share):
    chosen = sorted({*TRIED[share::SHARES], BUGS[share % len(BUGS)]})
    for name, found in families(chosen):
        assert found.by_dtype, f"{name}: {found}"
        assert not found.false_alarm, f"{name}: {found}"
        assert not found.missed, f"{name}: {found}"
        assert said(found) == said(KNOWN[name]), f"{name}: {found}"


def test_the_page_has_no_false_alarm_and_misses_nothing():
    assert [name for name in TRIED if KNOWN[name].false_alarm or KNOWN[name].missed] == []
    assert {"apertus", "hrm_text"} <= set(BUGS)


def test_the_pages_are_what_was_recorded():
    for path, text in page.pages(read()).items():
        assert path.read_text() == text, f"python -m tools.families.own_tp writes {path.name}"


@own_groups()
def doubled(folder, run):
    """Train a step in which each rank's gradient of fused experts is twice what it should be."""
    model = ranks.load("qwen3_moe", folder, torch.float64)
    with bisect.record(folder / run, model):
        ranks.loss_of(model).backward()
        for name, parameter in model.named_parameters():
            if run == "two" and name.endswith("layers.1.mlp.experts.gate_up_proj"):
                parameter.grad.mul_(2)


def test_a_fault_of_fused_experts_is_found(tmp_path):
    ranks.save("qwen3_moe", tmp_path)
    run_ranks(doubled, 1, tmp_path, "one.float64")
    for run in ("two", "right"):
        run_ranks(doubled, 2, tmp_path, run)
    (tmp_path / "two").rename(tmp_path / "two.float64")
    found = judge(tmp_path, "float64")
    assert found.word == WRONG
    assert found.words.startswith("gradient model.layers.1.mlp.experts.gate_up_proj, step 0")
    assert "every rank has 2 times the right values" in " ".join(found.how)
    assert bisect.compare(tmp_path / "one.float64", tmp_path / "right").sound


def test_what_is_misjudged():
    wrong, right = Judgement(WRONG), Judgement(RIGHT)
    assert Family(apart={"loss": (1e-14, "")}, by_dtype={"float64": wrong}).false_alarm
    assert Family(apart={"loss": (1e-3, "")}, by_dtype={"float64": right}).missed
    assert not Family(apart={"loss": (1e-14, "")}, by_dtype={"float64": right}).false_alarm

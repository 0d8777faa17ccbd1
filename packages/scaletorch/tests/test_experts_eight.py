"""Mixtures of experts on 8 ranks: a few of the layouts that `experts_on_eight.py` trains."""

import pytest
from sweeps import today

pytest.importorskip("transformers")

from experts_on_eight import AXES, Case, covering, layouts, pairs_of, values
from test_experts import FAMILIES

PLAIN = {
    "sequence_parallel": False, "recompute": False, "stage": 0, "schedule": "1f1b",
    "micro_batches": 1, "cp_method": "ring", "skewed": False,
}  # fmt: skip
CASES = [
    ("8x1x1x1-8-1", "Olmoe", {"stage": 2, "micro_batches": 2}),
    ("2x1x2x2-8-1", "Qwen3Moe", {"stage": 1, "sequence_parallel": True}),
    ("2x1x2x2-2-2", "Glm4Moe", {"stage": 1, "recompute": True, "skewed": True}),
    ("2x2x1x2-4-1", "DeepseekV3", {"schedule": "dualpipe_v", "micro_batches": 4, "skewed": True}),
    ("2x2x2x1-2-1", "Mixtral", {"schedule": "zb_h1", "micro_batches": 2, "stage": 1}),
    ("1x2x1x4-1-1", "GptOss", {"schedule": "interleaved_1f1b", "micro_batches": 2}),
    ("1x4x1x2-2-1", "DeepseekV3", {"recompute": True, "micro_batches": 2, "stage": 2}),
    ("2x1x1x4-2-4", "GptOss", {"sequence_parallel": True, "stage": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "family", "options"), today(CASES, 2))
def test_a_layout_trains_as_one_process(layout, family, options):
    sizes = dict(zip(AXES, map(int, layout.replace("x", "-").split("-")), strict=True))
    Case(**sizes, **{**PLAIN, **options, "family": family}).train()


def test_the_program_tries_every_layout_and_every_pair():
    cases = covering()
    assert {case[: len(AXES)] for case in cases} == {
        tuple(getattr(grid, axis) for axis in AXES) for grid in layouts()
    }
    met = set().union(*map(pairs_of, cases))
    for family in FAMILIES:
        for ep in (1, 2, 4, 8):
            assert (("ep", ep), ("family", family)) in met
    for one in values(next(iter(layouts())))["stage"]:
        assert (("recompute", True), ("stage", one)) in met

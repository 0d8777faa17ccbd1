"""Mixtures of experts on 8 ranks: losses, gradients, norms and steps of one process."""

import pytest
from sweeps import today

pytest.importorskip("transformers")

from test_experts import trained

from scaletorch.parallel.pipeline_parallel import SCHEDULES

AXES = ("dp", "pp", "cp", "tp", "ep", "etp")
SHARED = {"sequence_parallel": True}
# Layout, family, options of `parallelize`, micro-batches, ZeRO stage, whether one expert gets all.
CASES = [
    ("8x1x1x1-8-1", "Olmoe", {}, 2, 2, False),
    ("2x1x2x2-8-1", "Qwen3Moe", SHARED, 1, 1, False),
    ("2x1x2x2-2-2", "Glm4Moe", {"recompute": True}, 1, 1, True),
    ("2x2x1x2-4-1", "DeepseekV3", {"schedule": "dualpipe_v"}, 4, 0, True),
    ("2x2x2x1-2-1", "Mixtral", {"schedule": "zb_h1"}, 2, 1, False),
    ("1x2x1x4-1-1", "GptOss", {"schedule": "interleaved_1f1b"}, 2, 0, False),
    ("1x4x1x2-2-1", "DeepseekV3", {"recompute": True}, 2, 2, False),
    ("2x1x1x4-2-4", "GptOss", SHARED, 1, 2, False),
]


@pytest.mark.parametrize(
    ("layout", "family", "options", "micro_batches", "stage", "skewed"), today(CASES, 8)
)
def test_a_layout_trains_as_one_process(layout, family, options, micro_batches, stage, skewed):
    numbers = dict(zip(AXES, map(int, layout.replace("x", "-").split("-")), strict=True))
    sizes = {f"{axis}_size": size for axis, size in numbers.items()}
    schedule = SCHEDULES[options.get("schedule", "1f1b")]
    layers = max(2, schedule(numbers["pp"], micro_batches).num_stages)
    trained(8, family, sizes, options, micro_batches, stage, layers, skewed)

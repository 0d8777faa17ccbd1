"""Mixtures of experts under tensor parallelism: each expert's width divided over the ranks."""

import pytest
from sweeps import today

from scaletorch.parallel.tensor_parallel import Slices, Stacked

transformers = pytest.importorskip("transformers")

from test_experts import FAMILIES, trained  # noqa: E402

SEQUENCES = {"sequence_parallel": True}
NAMED = {"plan": {"**.mlp.experts": Stacked({"gate_up_proj": Slices(1, parts=2), "down_proj": 2})}}


@pytest.mark.parametrize("family", today([*FAMILIES], 6))
def test_experts_divided_both_ways(family):
    sizes = {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}
    trained(4, family, sizes)


LAYOUTS = [
    ("Qwen3Moe", {"tp_size": 4}, SEQUENCES, 2, 0),
    ("GptOss", {"tp_size": 4}, {}, 1, 0),
    ("GptOss", {"dp_size": 2, "tp_size": 2, "ep_size": 2}, {}, 1, 0),
    ("GptOss", {"dp_size": 2, "tp_size": 2, "ep_size": 4}, SEQUENCES, 1, 1),
    ("GptOss", {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, SEQUENCES, 1, 1),
    ("DeepseekV3", {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, SEQUENCES, 2, 2),
    ("Mixtral", {"dp_size": 2, "tp_size": 2}, {"recompute": True, **SEQUENCES}, 1, 2),
    ("Qwen3Moe", {"cp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, {}, 1, 0),
    ("Qwen3Moe", {"pp_size": 2, "tp_size": 2}, {"recompute": True}, 2, 0),
    ("Mixtral", {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, NAMED, 1, 0),
    ("Mixtral", {"dp_size": 2, "tp_size": 2, "ep_size": 4}, NAMED, 1, 0),
    ("Qwen3Moe", {"dp_size": 2, "tp_size": 2, "etp_size": 1}, {}, 1, 2),
    ("GptOss", {"dp_size": 2, "tp_size": 2, "etp_size": 1}, SEQUENCES, 1, 0),
    ("Mixtral", {"dp_size": 2, "tp_size": 2, "etp_size": 1}, NAMED, 2, 1),
]


@pytest.mark.parametrize(
    ("family", "sizes", "options", "micro_batches", "stage"), today(LAYOUTS, 14)
)
def test_layouts(family, sizes, options, micro_batches, stage):
    trained(4, family, sizes, options, micro_batches, stage)

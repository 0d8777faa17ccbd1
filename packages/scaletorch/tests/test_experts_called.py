"""Experts that are called with sorted rows or with all of them, and experts without weights."""

import pytest

transformers = pytest.importorskip("transformers")

from test_experts import CALLED, trained  # noqa: E402

SEQUENCES = {"sequence_parallel": True}
LAYOUTS = [
    ({"dp_size": 4, "ep_size": 2}, {}, 1, 0),
    ({"dp_size": 4, "ep_size": 4}, {}, 2, 1),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {}, 1, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, {}, 1, 0),
]


@pytest.mark.parametrize("family", CALLED)
@pytest.mark.parametrize(("sizes", "options", "micro_batches", "stage"), LAYOUTS)
def test_layouts(family, sizes, options, micro_batches, stage):
    trained(4, family, sizes, options, micro_batches, stage)

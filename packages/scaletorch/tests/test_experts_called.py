"""Families whose experts are called with sorted rows or with all, or that have none for a token."""

import pytest
import torch
from sweeps import today

from scaletorch import compose
from scaletorch.checkpoint import load
from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pg_manager import destroy_process_group_manager

transformers = pytest.importorskip("transformers")

from test_experts import CALLED, build, reference, trained  # noqa: E402
from test_experts_checkpoint import begin, go_on, prepared  # noqa: E402

SEQUENCES = {"sequence_parallel": True}
BOTH = {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}
SHARED = {"dp_size": 2, "tp_size": 2, "ep_size": 4}
PLANNED = [name for name in CALLED if name not in ("JetMoe", "Dbrx")]  # for tp
LAYOUTS = [
    ({"dp_size": 4, "ep_size": 2}, {}, 1, 0),
    ({"dp_size": 4, "ep_size": 4}, {}, 2, 1),
    (SHARED, {}, 1, 0),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"recompute": True}, 2, 1),
]


@pytest.mark.parametrize(
    ("family", "sizes", "options", "micro_batches", "stage"),
    [
        (family, *layout)
        for layout in today(LAYOUTS, 4)
        for family in (PLANNED if "tp_size" in layout[0] else CALLED)
    ],
)
def test_layouts(family, sizes, options, micro_batches, stage):
    trained(4, family, sizes, options, micro_batches, stage)


SHARES = [SHARED, {"dp_size": 2, "tp_size": 2, "etp_size": 1}]


@pytest.mark.parametrize(
    ("family", "sizes"), today([(family, sizes) for sizes in SHARES for family in PLANNED], 2)
)
def test_shards_of_sequences(family, sizes):
    trained(4, family, sizes, SEQUENCES)


@pytest.mark.parametrize("family", today([f for f in PLANNED if f != "LongcatFlash"], 2))
def test_experts_divided_both_ways(family):
    trained(4, family, BOTH, {})


def test_experts_that_do_nothing_are_not_divided_both_ways():
    with pytest.raises(RankFailedError, match="the style 'moe_identity_expert', which is none of"):
        trained(4, "LongcatFlash", BOTH, {})


def test_experts_that_would_miss_tokens_are_refused():
    with pytest.raises(RankFailedError, match=r"experts '.*' are .*rows for all.*take etp = 1"):
        trained(4, "Llama4", BOTH, SEQUENCES)


def state_of(folder, family):
    model, optimizer = prepared({}, 0, family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    load(folder, model, optimizer)
    state = compose.full_state_dict(model)
    destroy_process_group_manager()
    return state


@pytest.mark.parametrize("family", today([*CALLED], 4))
def test_checkpoints_and_files_of_transformers(family, tmp_path):
    run_ranks(begin, 4, str(tmp_path), {"dp_size": 4, "ep_size": 4}, 1, family, timeout=200)
    shared = SHARED if family in PLANNED else {"dp_size": 4, "ep_size": 2}
    run_ranks(go_on, 4, reference(family), str(tmp_path), shared, 0, family, timeout=200)
    run_ranks(go_on, 1, reference(family), str(tmp_path), {}, 0, family, timeout=200)
    (expected,) = run_ranks(state_of, 1, str(tmp_path), family, timeout=200)
    plain = build(family)
    plain.config.save_pretrained(tmp_path / "plain")
    theirs = type(plain).from_pretrained(tmp_path / "plain", dtype=torch.float64).state_dict()
    assert theirs.keys() == expected.keys()
    for name, tensor in theirs.items():
        assert relative_error(tensor, expected[name].to(tensor.dtype)) < 1e-9, name

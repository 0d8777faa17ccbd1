"""Llama 4, whose experts are called with as many rows for each."""

import pytest
import torch
from sweeps import today

from scaletorch import compose
from scaletorch.checkpoint import load
from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.pg_manager import destroy_process_group_manager

transformers = pytest.importorskip("transformers")

from test_experts import build, reference, trained  # noqa: E402
from test_experts_checkpoint import begin, go_on, prepared  # noqa: E402

SEQUENCES = {"sequence_parallel": True}
BOTH = {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}
SHARED = {"dp_size": 2, "tp_size": 2, "ep_size": 4}
FOLDED = {"dp_size": 2, "tp_size": 2, "etp_size": 1}
LAYOUTS = [
    ({"dp_size": 4, "ep_size": 2}, {}, 1, 0),
    ({"dp_size": 4, "ep_size": 4}, {}, 2, 1),
    (SHARED, {}, 1, 0),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, {"recompute": True}, 2, 1),
    (BOTH, {}, 1, 0),
    (SHARED, SEQUENCES, 1, 0),
    (FOLDED, SEQUENCES, 1, 0),
]


@pytest.mark.parametrize(
    ("sizes", "options", "micro_batches", "stage"),
    today(LAYOUTS, 7),
)
def test_layouts(sizes, options, micro_batches, stage):
    trained(4, "Llama4", sizes, options, micro_batches, stage)


def test_experts_that_would_miss_tokens_are_refused():
    with pytest.raises(RankFailedError, match=r"experts '.*' are .*rows for all.*take etp = 1"):
        trained(4, "Llama4", BOTH, SEQUENCES)


def state_of(folder):
    model, optimizer = prepared({}, 0, "Llama4")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    load(folder, model, optimizer)
    state = compose.full_state_dict(model)
    destroy_process_group_manager()
    return state


def test_checkpoints_and_files_of_transformers(tmp_path):
    expected, folder = reference("Llama4"), str(tmp_path)
    run_ranks(begin, 4, folder, {"dp_size": 4, "ep_size": 4}, 1, "Llama4", timeout=200)
    run_ranks(go_on, 4, expected, folder, SHARED, 0, "Llama4", timeout=200)
    run_ranks(go_on, 1, expected, folder, {}, 0, "Llama4", timeout=200)
    (state,) = run_ranks(state_of, 1, folder, timeout=200)
    plain = build("Llama4")
    plain.config.save_pretrained(tmp_path / "plain")
    theirs = type(plain).from_pretrained(tmp_path / "plain", dtype=torch.float64).state_dict()
    assert theirs.keys() == state.keys()
    for name, tensor in theirs.items():
        assert relative_error(tensor, state[name].to(tensor.dtype)) < 1e-9, name

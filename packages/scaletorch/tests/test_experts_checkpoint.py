"""Experts' weights and moments on another layout, in one process, and in transformers' files."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from sweeps import today
from training import adamw, go_on_and_compare, grid, in_one_process, take_steps

from scaletorch import compose
from scaletorch.checkpoint import export_safetensors, import_safetensors
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer

transformers = pytest.importorskip("transformers")

from test_experts import BOUND, STEPS, batch, build, reference  # noqa: E402
from test_verify_experts import uneven  # noqa: E402

FAMILY = "DeepseekV3"
BATCHES = [batch(step) for step in range(STEPS)]


LAYOUTS = [
    ({"dp_size": 4, "ep_size": 4}, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, 1),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, 2),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, 2),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, 1),
    ({"tp_size": 4}, 0),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, 2),
]


ALONE = ({}, 0)
CASES = [
    *((FAMILY, *pair) for pair in pairwise([*LAYOUTS, LAYOUTS[0]])),
    (FAMILY, LAYOUTS[1], ALONE),
    (FAMILY, ALONE, LAYOUTS[2]),
    ("GptOss", LAYOUTS[4], ALONE),  # with biases that are added once
    ("GptOss", LAYOUTS[4], LAYOUTS[5]),
]


@pytest.mark.parametrize(("family", "first", "second"), today(CASES, 4))
def test_training_goes_on_on_another_layout(tmp_path, family, first, second):
    given = partial(build, family), (first, second), BATCHES, adamw, tmp_path
    bounds = {"bound": BOUND, "weights": 1e-9}
    go_on_and_compare(reference(family), *given, bounds=bounds, clip=0.3)


def exported(folder, sizes, stage):
    """Train on a layout, and write its weights for others."""
    with grid(sizes) as manager:
        model = compose.parallelize(build(FAMILY), manager, rehearse=False)
        optimizer = shard_optimizer(adamw(model), model, stage=stage)
        take_steps(model, optimizer, BATCHES[:-1], clip=0.3)
        export_safetensors(model, folder)


def imported(folder, sizes):
    with grid(sizes) as manager:
        model = compose.parallelize(build(FAMILY), manager, rehearse=False)
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
        import_safetensors(model, folder)
        return compose.full_state_dict(model)


def test_transformers_files(tmp_path):
    sizes, stage = LAYOUTS[1]
    run_ranks(exported, 4, tmp_path / "plain", sizes, stage, timeout=200)
    plain = build(FAMILY)
    config = plain.config
    config.save_pretrained(tmp_path / "plain")
    theirs = type(plain).from_pretrained(tmp_path / "plain", dtype=torch.float64)
    expected = in_one_process(build(FAMILY), BATCHES[:-1], adamw, clip=0.3).weights
    found = theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():  # transformers keeps its routers in float32
        assert relative_error(tensor, expected[name].to(tensor.dtype)) < 1e-9, name
    theirs.save_pretrained(tmp_path / "theirs")
    for each in run_ranks(imported, 4, str(tmp_path / "theirs"), sizes, timeout=200):
        for name, tensor in each.items():
            assert relative_error(tensor, found[name]) < 1e-15, name


def build_uneven():
    torch.manual_seed(6)
    return uneven().double()


def test_stacks_of_which_ranks_have_unequal_shares_go_on_on_other_layouts(tmp_path):
    expected = in_one_process(build_uneven(), BATCHES, adamw, clip=0.3)
    first, bounds = ({"dp_size": 4, "ep_size": 2}, 2), {"bound": BOUND, "weights": 1e-9}
    for number, second in enumerate((ALONE, ({"dp_size": 2, "ep_size": 2}, 2), LAYOUTS[3])):
        given = build_uneven, (first, second), BATCHES, adamw, tmp_path / str(number)
        go_on_and_compare(expected, *given, bounds=bounds, clip=0.3)

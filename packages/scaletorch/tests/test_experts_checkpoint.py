"""Experts' weights and moments on another layout, in one process, and in transformers' files."""

from itertools import pairwise

import pytest
import torch
from sweeps import today
from training import adamw, in_one_process, ranks_of

from scaletorch import compose
from scaletorch.checkpoint import export_safetensors, import_safetensors, load, save
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

transformers = pytest.importorskip("transformers")

from test_experts import BOUND, STEPS, batch, build, reference  # noqa: E402
from test_verify_experts import uneven  # noqa: E402

FAMILY = "DeepseekV3"


def prepared(sizes, stage, family=FAMILY):
    manager = setup_process_group_manager(**sizes)
    model = compose.parallelize(build(family), manager, rehearse=False)
    optimizer = adamw(model)
    if stage:
        shard_optimizer(optimizer, model, stage=stage)
    return model, optimizer


def step_on(model, optimizer, step):
    optimizer.zero_grad()
    loss = compose.train_step(model, compose.shard_global_batch(batch(step), 1, model=model))
    compose.clip_grad_norm_(model, 0.3)
    optimizer.step()
    return loss


def begin(folder, sizes, stage, family=FAMILY):
    model, optimizer = prepared(sizes, stage, family)
    for step in range(STEPS - 1):
        step_on(model, optimizer, step)
    save(folder, model, optimizer, step=STEPS - 1)
    if sizes.get("ep_size"):
        export_safetensors(model, f"{folder}/plain")
    destroy_process_group_manager()


def go_on(expected, folder, sizes, stage, family=FAMILY):
    model, optimizer = prepared(sizes, stage, family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # so that what is not loaded shows
    load(folder, model, optimizer)
    loss = step_on(model, optimizer, STEPS - 1)
    assert loss.item() == pytest.approx(expected.losses[STEPS - 1], rel=BOUND)
    state = compose.full_state_dict(model)
    for name, weight in expected.weights.items():
        assert relative_error(state[name], weight) < 1e-9, name
    destroy_process_group_manager()


LAYOUTS = [
    ({"dp_size": 4, "ep_size": 4}, 0),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, 1),
    ({"dp_size": 2, "pp_size": 2, "ep_size": 2}, 2),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, 2),
    ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, 1),
    ({"tp_size": 4}, 0),
    ({"dp_size": 2, "tp_size": 2, "etp_size": 1}, 2),
]


def train(folder, family, first, second):
    """Train on one layout, and go on on another one."""
    folder, expected = str(folder), reference(family)
    run_ranks(begin, ranks_of(first[0]), folder, *first, family, timeout=200)
    run_ranks(go_on, ranks_of(second[0]), expected, folder, *second, family, timeout=200)


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
    train(tmp_path, family, first, second)


def imported(folder, sizes):
    model, _ = prepared(sizes, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    import_safetensors(model, folder)
    state = compose.full_state_dict(model)
    destroy_process_group_manager()
    return state


def test_transformers_files(tmp_path):
    sizes, stage = LAYOUTS[1]
    run_ranks(begin, 4, str(tmp_path), sizes, stage, timeout=200)
    plain = build(FAMILY)
    config = plain.config
    config.save_pretrained(tmp_path / "plain")
    theirs = type(plain).from_pretrained(tmp_path / "plain", dtype=torch.float64)
    batches = [batch(step) for step in range(STEPS - 1)]
    expected = in_one_process(build(FAMILY), batches, adamw, clip=0.3).weights
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


def parallel_uneven(sizes):
    manager = setup_process_group_manager(**sizes)
    model = compose.parallelize(build_uneven(), manager, rehearse=False)
    optimizer = adamw(model)
    if manager.cp_dp_size > 1:
        shard_optimizer(optimizer, model, stage=2)
    return model, optimizer


def then(model, optimizer):
    """Return the weights before and after a step."""
    before = compose.full_state_dict(model)
    step_on(model, optimizer, 1)
    after = compose.full_state_dict(model)
    destroy_process_group_manager()
    return before, after


def saved_uneven(folder, sizes):
    model, optimizer = parallel_uneven(sizes)
    step_on(model, optimizer, 0)
    save(folder, model, optimizer, step=1)
    return then(model, optimizer)


def loaded_uneven(folder, sizes):
    model, optimizer = parallel_uneven(sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    load(folder, model, optimizer)
    return then(model, optimizer)


def test_stacks_of_which_ranks_have_unequal_shares_go_on_on_other_layouts(tmp_path):
    before, expected = run_ranks(saved_uneven, 4, tmp_path / "one", {"dp_size": 4, "ep_size": 2})[0]
    for ranks, sizes in ((1, {}), (2, {"dp_size": 2, "ep_size": 2}), (4, LAYOUTS[3][0])):
        after, later = run_ranks(loaded_uneven, ranks, tmp_path / "one", sizes)[0]
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], each) for name, each in before.items())
        assert max(relative_error(later[name], each) for name, each in expected.items()) < BOUND

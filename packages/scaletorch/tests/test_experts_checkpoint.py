"""Experts' weights and moments on another layout, in one process, and in transformers' files."""

from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
from sweeps import today
from training import adamw, grid, in_one_process, ranks_of

from scaletorch import compose
from scaletorch.checkpoint import export_safetensors, import_safetensors, load, save
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer

transformers = pytest.importorskip("transformers")

from test_experts import BOUND, STEPS, batch, build, reference  # noqa: E402
from test_verify_experts import uneven  # noqa: E402

FAMILY = "DeepseekV3"


@contextmanager
def prepared(sizes, stage, make):
    """Yield a model and its optimizer on a layout."""
    with grid(sizes) as manager:
        model = compose.parallelize(make(), manager, rehearse=False)
        optimizer = adamw(model)
        if stage:
            shard_optimizer(optimizer, model, stage=stage)
        yield model, optimizer


def step_on(model, optimizer, step):
    optimizer.zero_grad()
    loss = compose.train_step(model, compose.shard_global_batch(batch(step), 1, model=model))
    compose.clip_grad_norm_(model, 0.3)
    optimizer.step()
    return loss


def spoil(model):
    """Change all parameters, so that what is not loaded shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)


def begin(folder, sizes, stage, family=FAMILY):
    with prepared(sizes, stage, partial(build, family)) as (model, optimizer):
        for step in range(STEPS - 1):
            step_on(model, optimizer, step)
        save(folder, model, optimizer, step=STEPS - 1)
        if sizes.get("ep_size"):
            export_safetensors(model, f"{folder}/plain")


def go_on(expected, folder, sizes, stage, family):
    with prepared(sizes, stage, partial(build, family)) as (model, optimizer):
        spoil(model)
        load(folder, model, optimizer)
        loss = step_on(model, optimizer, STEPS - 1)
        assert loss.item() == pytest.approx(expected.losses[STEPS - 1], rel=BOUND)
        state = compose.full_state_dict(model)
    for name, weight in expected.weights.items():
        assert relative_error(state[name], weight) < 1e-9, name


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
    folder, expected = str(tmp_path), reference(family)
    run_ranks(begin, ranks_of(first[0]), folder, *first, family, timeout=200)
    run_ranks(go_on, ranks_of(second[0]), expected, folder, *second, family, timeout=200)


def imported(folder, sizes):
    with prepared(sizes, 0, partial(build, FAMILY)) as (model, _):
        spoil(model)
        import_safetensors(model, folder)
        return compose.full_state_dict(model)


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


def step_uneven(folder, sizes, then):
    """Return the weights before and after a step, behind one that was saved or loaded."""
    with prepared(sizes, 2 if sizes else 0, build_uneven) as (model, optimizer):
        if then == "save":
            step_on(model, optimizer, 0)
            save(folder, model, optimizer, step=1)
        else:
            spoil(model)
            load(folder, model, optimizer)
        before = compose.full_state_dict(model)
        step_on(model, optimizer, 1)
        return before, compose.full_state_dict(model)


def test_stacks_of_which_ranks_have_unequal_shares_go_on_on_other_layouts(tmp_path):
    folder = tmp_path / "one"
    given = folder, {"dp_size": 4, "ep_size": 2}, "save"
    before, expected = run_ranks(step_uneven, 4, *given)[0]
    for ranks, sizes in ((1, {}), (2, {"dp_size": 2, "ep_size": 2}), (4, LAYOUTS[3][0])):
        after, later = run_ranks(step_uneven, ranks, folder, sizes, "load")[0]
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], each) for name, each in before.items())
        assert max(relative_error(later[name], each) for name, each in expected.items()) < BOUND

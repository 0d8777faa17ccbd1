"""Which optimizers are right where, by trying each; docs/optimizers.md has the same table."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import sample_optimizers as samples
import test_whole_matrices as case
import torch
from sample_optimizers import gap
from sweeps import today
from test_whole_matrices import BOUND, plain, step_in_one_process, step_on
from training import grid

from scaletorch.compose import full_state_dict, parallelize, whole_matrices
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer

GUIDE = Path(__file__).parents[3] / "docs" / "optimizers.md"
STEPS = 3
# Large epsilons, where there are any: small ones turn rounding of tiny gradients into whole steps.
OURS = {
    "LARS": samples.Lars, "LAMB": samples.Lamb, "Shampoo": samples.Shampoo,
    "8-bit blocks": samples.Blocks8bit, "clipped by the norm of all": samples.ClippedAll,
    "sign-like": samples.Sign, "schedule-free": samples.ScheduleFree,
}  # fmt: skip
THEIRS = [
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD", "Adafactor", "Muon", "LBFGS", "SparseAdam",
]  # fmt: skip
EPS = {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop"}


def test_every_optimizer_of_torch_is_tried():
    known = {
        name for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }  # fmt: skip
    assert known - {"Optimizer"} == set(THEIRS)


def made(name, model):
    parameters = list(model.parameters())
    if name == "Muon":
        parameters = [each for each in parameters if each.ndim == 2]
    if name in OURS:
        return OURS[name](parameters)
    options = {"lr": 0.01} | ({"eps": 1e-2} if name in EPS else {})
    return getattr(torch.optim, name)(parameters, **options)


@functools.cache
def expected(name):
    """Return one process's weights, and those for evaluation; None if it takes no plain steps."""
    model = plain("gated")
    optimizer = made(name, model)
    try:
        for step in range(STEPS):
            step_in_one_process(model, [optimizer], step)
    except (TypeError, RuntimeError):
        return None
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {key: value.clone() for key, value in model.state_dict().items()}


def outcome(name, weights, prepare):
    """Train as one rank; return what becomes of it, and by how much it is off."""
    model = parallelize(plain("gated"), case.MANAGER, plan=case.PLAN, rehearse=False)
    optimizer = made(name, model)
    try:
        prepare(optimizer, model)
        for step in range(STEPS):
            step_on(model, [optimizer], step)
    except InvalidArgumentError as error:
        return f"refused: {error}"
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return "right" if gap(full_state_dict(model), weights) < BOUND else "WRONG"


def nothing(optimizer, model):
    pass


def sharded(optimizer, model):
    shard_optimizer(optimizer, model, stage=1, overlap=True)


COLUMNS = [
    ({"tp_size": 2}, nothing), ({"tp_size": 2}, whole_matrices), ({"dp_size": 2}, sharded),
    ({"pp_size": 2}, nothing),
]  # fmt: skip


def tried(every):
    """Return a row for each optimizer."""
    rows = {name: [] for name in every}
    for sizes, prepare in COLUMNS:
        with grid(sizes) as case.MANAGER:
            for name, weights in every.items():
                rows[name].append(outcome(name, weights, prepare))
    return rows


@pytest.mark.timeout(300)
def test_optimizers_are_right_or_refused_as_the_guide_says():
    every = {name: expected(name) for name in today([*THEIRS, *OURS], 7)}
    first, second = run_ranks(tried, 2, every, timeout=250)
    for name, row in first.items():
        short = [each.split(":")[0] for each in row]
        assert short == [each.split(":")[0] for each in second[name]], name
        assert "WRONG" not in short, (name, row)
    if not GUIDE.exists():
        pytest.skip("the guide is in the repository alone")
    rows = re.findall(r"^\| ([^|]+) \| (right|refused) \| (\w+) \| (\w+) \| (\w+) \|$",
                      GUIDE.read_text(), re.M)  # fmt: skip
    said = {name.strip("` "): columns for names, *columns in rows for name in names.split(", ")}
    assert said.keys() == {*THEIRS, *OURS}
    found = {name: [each.split(":")[0] for each in row] for name, row in first.items()}
    assert found == {name: said[name] for name in every}

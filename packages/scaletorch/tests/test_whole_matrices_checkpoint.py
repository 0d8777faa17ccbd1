"""The state of whole matrices goes from any layout to any other."""

from __future__ import annotations

import pytest
import test_whole_matrices as case
import torch
from sample_optimizers import gap
from sweeps import today
from test_whole_matrices import BOUND, STEPS, muon, reference, shampoo, step_on

from scaletorch.checkpoint import load, save
from scaletorch.compose import full_state_dict
from scaletorch.dist import RankPool
from scaletorch.dist.testing import preload
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

SAVED = 1  # steps

preload("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")


@pytest.fixture(scope="module")
def four():
    with RankPool(4, seed=0, timeout=200) as pool:
        yield pool


def prepared(sizes, make, zero):
    case.MANAGER = setup_process_group_manager(**sizes)
    return case.prepared("llama", make, zero=zero)


def begin(folder, sizes, make, zero):
    model, optimizers = prepared(sizes, make, zero)
    for step in range(SAVED):
        step_on(model, optimizers, step)
    for number, optimizer in enumerate(optimizers):
        save(f"{folder}/{number}", model, optimizer, step=SAVED)
    destroy_process_group_manager()


def go_on(expected, folder, sizes, make, zero):
    model, optimizers = prepared(sizes, make, zero)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # so that what is not loaded shows
    for number, optimizer in enumerate(optimizers):
        load(f"{folder}/{number}", model, optimizer)
    for step in range(SAVED, STEPS):
        step_on(model, optimizers, step)
    found = full_state_dict(model)
    destroy_process_group_manager()
    return gap(found, expected)


LAYOUTS = [
    ({"tp_size": 2, "dp_size": 2}, 2),
    ({"tp_size": 2, "pp_size": 2}, 0),
    ({"tp_size": 4}, 0),
    ({"dp_size": 4}, 1),
]


def trained(four, tmp_path, make, first, second):
    """Train on one layout, go on on another; compare with one process on every rank."""
    expected = reference("llama", make)[-1]

    def run(function, *args):  # on four ranks, or in this process
        sizes = args[-3]
        return four.run(function, *args) if sizes else [function(*args)]

    run(begin, str(tmp_path), first[0], make, first[1])
    for error in run(go_on, expected, str(tmp_path), second[0], make, second[1]):
        assert error < BOUND


@pytest.mark.parametrize("number", today(range(len(LAYOUTS)), 4))
def test_muon_goes_on_on_another_layout(four, tmp_path, number):
    trained(four, tmp_path, muon, LAYOUTS[number], LAYOUTS[(number + 1) % len(LAYOUTS)])


def test_one_process_takes_over_and_hands_back(four, tmp_path):
    alone = {}, 0
    trained(four, tmp_path / "a", muon, LAYOUTS[0], alone)
    trained(four, tmp_path / "b", muon, alone, LAYOUTS[1])


def test_state_of_other_shapes_than_its_matrix(four, tmp_path):
    trained(four, tmp_path, shampoo, ({"tp_size": 4}, 0), ({"tp_size": 2, "dp_size": 2}, 1))

"""The order of rows depends on step and seed alone, and every rank reads its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sample_optimizers import gap
from sweeps import today
from torch.utils.data import DataLoader
from training import grid, llama

from scaletorch.checkpoint import load, save
from scaletorch.compose import (
    full_state_dict,
    parallelize,
    rows_of_step,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import get_rank
from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test, run_ranks

ROWS, BATCH, SAVED, STEPS = 13, 8, 2, 4  # 13: batches that end an epoch begin the next


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 1000, 4097])
def test_every_row_comes_once_in_every_epoch(rows):
    found = [rows_of_step(epoch, rows=rows, batch_size=rows, seed=3) for epoch in range(4)]
    for each in found:
        assert sorted(each) == list(range(rows))
    if rows >= 16:
        assert len({tuple(each) for each in found}) == 4
        other = rows_of_step(0, rows=rows, batch_size=rows, seed=4)
        assert other != found[0]


def test_the_order_is_random():
    """By the numbers of Kolmogorov and of Pearson, of an order that anybody may repeat."""
    rows = 20_000
    order = rows_of_step(0, rows=rows, batch_size=rows)
    bins = torch.zeros(10, 10)
    for place, row in enumerate(order):
        bins[place * 10 // rows, row * 10 // rows] += 1
    assert float(((bins - rows / 100) ** 2 / (rows / 100)).sum()) < 150  # 81 is expected
    pairs = torch.corrcoef(torch.tensor([order[:-1], order[1:]]).double())
    assert abs(pairs[0, 1]) < 0.03
    assert sum(b - a == 1 for a, b in pairwise(order)) < 10


def test_a_batch_may_end_an_epoch_and_rows_without_number_are_found_alone():
    stream = [row for step in range(13) for row in rows_of_step(step, rows=ROWS, batch_size=BATCH)]
    for epoch in range(BATCH):
        assert sorted(stream[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))
    far = rows_of_step(10**9, rows=10**15, batch_size=4, seed=-1)
    assert len(set(far)) == 4
    assert max(far) < 10**15


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"step": -1}, "step must be a whole number, at least 0; it is -1"),
        ({"step": 1.0}, "step must be a whole number"),
        ({"rows": 0}, "rows must be a whole number, at least 1"),
        ({"batch_size": True}, "batch_size must be a whole number, at least 1; it is True"),
        ({"seed": "x"}, "seed must be a whole number; it is 'x'"),
        ({"manager": 3}, "manager must be a ProcessGroupManager"),
    ],
)
def test_wrong_numbers_are_refused(wrong, text):
    given = {"step": 0, "rows": 4, "batch_size": 2, **wrong}
    with pytest.raises(InvalidArgumentError, match=text):
        rows_of_step(given.pop("step"), **given)


def row(index):
    """A row as a stream would give it, found by its number alone."""
    tokens = torch.randint(32, (9,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Data(torch.utils.data.Dataset):
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.read.append(index)
        return row(index)


def plain():
    return llama().double()


def train(sizes, folder, first, last):
    """Train some steps on a layout, each rank with its own rows; return what it has read."""
    with grid(sizes) as manager:
        model = parallelize(plain(), manager, rehearse=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if first:
            assert load(folder, model, optimizer).step == first
        read = []
        steps = (
            rows_of_step(step, rows=ROWS, batch_size=BATCH, seed=5) for step in range(first, last)
        )
        for batch in DataLoader(Data(read), batch_sampler=steps):
            train_step(model, shard_global_batch(batch, 1, model=model, own_rows=True))
            optimizer.step()
            optimizer.zero_grad()
        if folder and not first:
            save(folder, model, optimizer, step=last)
        weights = full_state_dict(model)
    return manager.dp_rank, read, weights


LAYOUTS = [
    ({"dp_size": 4}, {"dp_size": 2, "tp_size": 2}),
    ({"dp_size": 2, "cp_size": 2}, {"dp_size": 4}),
    ({"pp_size": 2, "tp_size": 2}, {"dp_size": 2, "cp_size": 2}),
]


@pytest.fixture(scope="module")
def one_process():
    return train({}, None, 0, STEPS)


@pytest.mark.parametrize(("first", "second"), today(LAYOUTS, len(LAYOUTS)))
def test_training_goes_on_with_the_same_rows_on_another_layout(
    tmp_path, one_process, first, second
):
    _, every, weights = one_process
    before = run_ranks(train, 4, first, str(tmp_path), 0, SAVED, timeout=200)
    after = run_ranks(train, 4, second, str(tmp_path), SAVED, STEPS, timeout=200)
    for sizes, ranks, start, stop in ((first, before, 0, SAVED), (second, after, SAVED, STEPS)):
        share = BATCH // sizes.get("dp_size", 1)
        for dp_rank, read, _ in ranks:
            firsts = [step * BATCH + dp_rank * share for step in range(start, stop)]
            assert read == [row for at in firsts for row in every[at : at + share]]
    for _, _, found in after:
        assert gap(found, weights) < 1e-11


@distributed_test(2)
def test_ranks_of_one_place_must_have_read_the_same():
    with grid(tp_size=2) as manager:
        model = parallelize(plain(), manager, rehearse=False)
        rows = [row(index) for index in range(4)]
        batch = {name: torch.stack([each[name] for each in rows]) for name in rows[0]}
        batch["input_ids"][0, 0] = get_rank()
        with pytest.raises(MismatchError, match=r"the rows of dp0 input_ids: on rank 1"):
            train_step(model, shard_global_batch(batch, 1, model=model, own_rows=True))

"""Batches of any number of rows: ranks and micro-batches have one more or less, or none at all."""

import functools

import pytest
import torch
from sweeps import today
from training import adamw, cross_entropy, in_one_process, llama, train_and_compare

from scaletorch.compose import eval_step, parallelize, rows_of_step, shard_global_batch
from scaletorch.compose.batches import rows_of_ranks
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

LAYOUTS = {
    "dp 4": {"dp_size": 4},
    "dp 2 x tp 2": {"dp_size": 2, "tp_size": 2},
    "dp 2 x pp 2": {"dp_size": 2, "pp_size": 2},
    "dp 2 x cp 2": {"dp_size": 2, "cp_size": 2},
    "pp 2 x tp 2": {"pp_size": 2, "tp_size": 2},
    "tp 4": {"tp_size": 4},
    "cp 4": {"cp_size": 4},
    "pp 4": {"pp_size": 4},
}
ROWS = (7, 5, 2, 1)  # of the steps, one after another


@pytest.mark.parametrize(("rows", "ranks", "micro_batches"), [(7, 2, 2), (5, 2, 4), (1, 3, 2)])
def test_shares_differ_by_at_most_one_row(rows, ranks, micro_batches):
    shares = rows_of_ranks(rows, ranks, micro_batches)
    assert [row for own in shares for share in own for row in share] == [*range(rows)]
    of_ranks = [sum(map(len, own)) for own in shares]
    assert max(of_ranks) - min(of_ranks) <= 1
    for own in shares:
        assert len(own) == micro_batches
        assert max(map(len, own)) - min(map(len, own)) <= 1


def of_squares(output, micro_batch):
    """A loss that is not zero for labels of -100, and counts rows."""
    logits = getattr(output, "logits", output)
    found = (logits.float() ** 2).mean((1, 2)).double() * micro_batch["loss_weight"]
    return found.sum(), len(found)


def model():
    return llama(vocab_size=64, num_layers=4).double()


def batches():
    found = []
    for step, rows in enumerate(ROWS):
        drawn = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(step))
        labels = drawn[:, 1:].clone()
        labels[:, : step + 1] = -100
        weight = torch.arange(1.0, rows + 1, dtype=torch.float64)
        found.append({"input_ids": drawn[:, :-1], "labels": labels, "loss_weight": weight})
    return found


def rows_of(micro_batch):
    return len(micro_batch["input_ids"])


@functools.cache
def expected(own):
    loss_fn = of_squares if own else cross_entropy
    return in_one_process(model(), batches(), adamw, loss_fn=loss_fn, clip=1.0)


# The loss of one's own takes a mean over positions and words, which cp and tp divide.
OWN = [("dp 4", True), ("dp 2 x pp 2", True), ("pp 4", True)]


@pytest.mark.parametrize(("layout", "own"), today([*((name, False) for name in LAYOUTS), *OWN], 11))
def test_steps_are_those_of_one_process(layout, own):
    told = {"loss_fn": of_squares, "count_fn": rows_of} if own else {}
    how = {"micro_batches": 3, "clip": 1.0, "rehearse": True, "bounds": {"weights": 1e-9}, **told}
    train_and_compare(expected(own), model, LAYOUTS[layout], batches(), adamw, **how)


def own_rows():
    manager = setup_process_group_manager(dp_size=2)
    parallel, losses = parallelize(model(), manager), []
    for batch, rows in zip(batches(), ROWS, strict=True):
        (share,) = rows_of_ranks(rows, 2, 1)[manager.dp_rank]
        own = {name: entry[share.start : share.stop] for name, entry in batch.items()}
        cut = shard_global_batch(own, 3, manager, own_rows=True)
        losses.append(eval_step(parallel, cut).item())
    destroy_process_group_manager()
    return losses


def test_ranks_may_read_their_rows_alone():
    plain, whole = model(), []
    for batch in batches():
        total, count = cross_entropy(plain(batch["input_ids"]), batch)
        whole.append((total / count).item())
    for found in run_ranks(own_rows, 2):
        assert found == pytest.approx(whole, rel=1e-11)


def read_rows():
    manager = setup_process_group_manager(dp_size=2)
    found = [rows_of_step(s, rows=9, batch_size=7, manager=manager) for s in range(3)]
    destroy_process_group_manager()
    return found


def test_ranks_read_as_many_rows_as_they_are_given():
    first, second = run_ranks(read_rows, 2)
    assert [(len(a), len(b)) for a, b in zip(first, second, strict=True)] == [(4, 3)] * 3
    whole = [row for a, b in zip(first, second, strict=True) for row in (*a, *b)]
    assert sorted(whole[:9]) == sorted(whole[9:18]) == [*range(9)]

"""The one loss rule: every rank has the global mean, and its own part of the gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    global_token_count,
    global_token_mean,
    setup_process_group_manager,
)


@distributed_test(4)
def test_counts_over_the_group():
    rank, world = c10d.get_rank(), c10d.group.WORLD
    labels = torch.full((2, 4), -100)
    labels[0, :rank] = 1  # rank 0 has none
    assert global_token_count(labels, group=world) == 6
    assert global_token_count([labels, labels[:1], labels[1:]], group=world) == 12
    assert global_token_count(iter([labels]), group=world) == 6
    assert global_token_count(labels, ignore_index=1, group=world) == 4 * 8 - 6
    assert global_token_count([], group=world) == 0
    with pytest.raises(StateError, match="cp_dp"):
        global_token_count(labels)


@distributed_test(4)
def test_group_defaults_to_the_cp_dp_axis():
    """Ranks that share a batch element over tp count it once."""
    setup_process_group_manager(tp_size=2, dp_size=2)
    try:
        assert global_token_count(torch.ones(3, dtype=torch.int32)) == 6
        assert global_token_mean(torch.tensor(6.0), 3).item() == 2.0
    finally:
        destroy_process_group_manager()


def check_mean(counts, expected_total):
    rank = c10d.get_rank()
    count = counts[rank]
    weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    number = float(count)
    loss = (weight * torch.tensor([number, 2 * number], dtype=torch.float64)).sum()
    mean = global_token_mean(loss, count, c10d.group.WORLD)
    mean.backward()
    assert mean.item() == (8 * sum(map(float, counts)) / expected_total if expected_total else 0.0)
    scale = number / expected_total if expected_total else 0.0
    assert weight.grad.tolist() == [scale, 2 * scale]


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        ([0, 4], 4),
        ([0, 0], 0),
        ([1, 0.25], 1.25),
        ([torch.tensor(7), torch.tensor([1.0])], 8),
        ([torch.tensor(True), 0], 1),
        ([2**24 + 1, 2**24 + 1], 2**25 + 2),  # beyond float32
    ],
)
def test_every_rank_has_the_global_mean(counts, total):
    run_ranks(check_mean, 2, counts, total)


def test_one_process_has_the_whole_batch():
    assert global_token_count(torch.tensor([1, -100, 2])) == 2
    assert global_token_mean(torch.tensor(3.0), 2).item() == 1.5
    assert math.isnan(global_token_mean(torch.tensor(math.nan), 1).item())


def test_no_token_at_all_is_zero_with_zero_gradients():
    weight = torch.tensor(2.0, requires_grad=True)
    mean = global_token_mean(weight * 5, 0)
    mean.backward()
    assert mean.item() == 0.0
    assert weight.grad.item() == 0.0
    assert global_token_mean(torch.tensor(math.nan), 0).item() == 0.0


@pytest.mark.parametrize("labels", [torch.ones(2), [torch.ones(2, dtype=torch.long), 3], "ab"])
def test_labels_must_be_integers(labels):
    with pytest.raises(InvalidArgumentError, match="labels must be integer tensors, got"):
        global_token_count(labels)


@pytest.mark.parametrize("loss", [1.0, torch.tensor(1), torch.ones(2), torch.tensor(1j)])
def test_loss_must_be_one_floating_element(loss):
    with pytest.raises(InvalidArgumentError, match="loss_sum must be a floating-point tensor of"):
        global_token_mean(loss, 1)


@pytest.mark.parametrize(
    "count", [-1, math.nan, math.inf, "3", None, torch.ones(2), torch.tensor(1j)]
)
def test_count_must_be_a_number(count):
    with pytest.raises(InvalidArgumentError, match="count must be a finite number"):
        global_token_mean(torch.tensor(1.0), count)

"""Batches of any number of rows: ranks and micro-batches have one more or less, or none at all."""

import functools

import pytest
import torch

from scaletorch.compose import (
    clip_grad_norm_,
    eval_step,
    full_state_dict,
    parallelize,
    rows_of_step,
    shard_global_batch,
    train_step,
)
from scaletorch.compose.batches import rows_of_ranks
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import setup_process_group_manager

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
MICRO_BATCHES = 3


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


def trained(sizes, micro_batches, own=False, own_rows=False):
    """Losses, norms, evaluations and weights of steps of ROWS rows."""
    manager = setup_process_group_manager(**sizes)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=4)
    model = parallelize(Llama(config).double(), manager)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step, rows in enumerate(ROWS):
        drawn = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(step))
        labels = drawn[:, 1:].clone()
        labels[:, : step + 1] = -100
        batch = {"input_ids": drawn[:, :-1], "labels": labels}
        if own:
            batch["loss_weight"] = torch.arange(1.0, rows + 1, dtype=torch.float64)
        if own_rows:
            (share,) = rows_of_ranks(rows, manager.dp_size, 1)[manager.dp_rank]
            batch = {name: entry[share.start : share.stop] for name, entry in batch.items()}
        cut = shard_global_batch(batch, micro_batches, manager, own_rows=own_rows)
        told = {"loss_fn": of_squares, "count_fn": lambda b: len(b["input_ids"])} if own else {}
        found.append(train_step(model, cut, **told).double())
        found.append(torch.as_tensor(clip_grad_norm_(model, 1.0)).double())
        optimizer.step()
        optimizer.zero_grad()
        found.append(eval_step(model, cut, loss_fn=told.get("loss_fn")))
    return torch.stack([each.cpu() for each in found]), full_state_dict(model)


@functools.cache
def in_one_process(own):
    return run_ranks(trained, 1, {}, 1, own)[0]


# The loss of one's own takes a mean over positions and words, which cp and tp divide.
@pytest.mark.parametrize(
    ("layout", "own"),
    [*((name, False) for name in LAYOUTS), ("dp 4", True), ("dp 2 x pp 2", True), ("pp 4", True)],
)
def test_steps_are_those_of_one_process(layout, own):
    numbers, weights = in_one_process(own)
    found = run_ranks(trained, 4, LAYOUTS[layout], MICRO_BATCHES, own)
    for own_numbers, own_weights in found:
        assert relative_error(own_numbers, numbers) < 1e-11
        for name, weight in weights.items():
            assert relative_error(own_weights[name], weight) < 1e-9, name


def test_ranks_may_read_their_rows_alone():
    numbers, _ = in_one_process(False)
    for own_numbers, _ in run_ranks(trained, 2, {"dp_size": 2}, MICRO_BATCHES, False, True):
        assert relative_error(own_numbers, numbers) < 1e-11


def read_rows():
    manager = setup_process_group_manager(dp_size=2)
    return [rows_of_step(s, rows=9, batch_size=7, manager=manager) for s in range(3)]


def test_ranks_read_as_many_rows_as_they_are_given():
    first, second = run_ranks(read_rows, 2)
    assert [(len(a), len(b)) for a, b in zip(first, second, strict=True)] == [(4, 3)] * 3
    whole = [row for a, b in zip(first, second, strict=True) for row in (*a, *b)]
    assert sorted(whole[:9]) == sorted(whole[9:18]) == [*range(9)]

"""Every layout gives one process's loss, gradients and stepped weights."""

import functools
import itertools
from functools import partial

import pytest
import torch
from sweeps import today
from training import in_one_process, llama, on_a_layout, require_alike

from scaletorch.dist.testing import run_ranks

BATCH, LENGTH, STEPS = 8, 12, 2
BOUND = 1e-10


def build(tied):
    model = llama(
        3, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=8, num_kv_heads=4,
        tie_embeddings=tied,
    ).double()  # fmt: skip
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    return model


def global_batch(step):
    """Ragged: half of the rows (one dp rank at dp 2) have no valid token, others in each step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(32, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    masked = step % 2 * (BATCH // 2)
    labels[masked : masked + BATCH // 2] = -100
    labels[masked - 1, LENGTH // 2 :] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


BATCHES = [global_batch(step) for step in range(STEPS)]


def half(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


@functools.cache
def expected(tied):
    return in_one_process(build(tied), BATCHES, half)


def train(layout, ties, schedule="1f1b"):
    """Two steps of SGD on this rank, of each kind of embeddings."""
    dp, pp, cp, tp = layout
    sizes = {"tp_size": tp, "cp_size": cp, "pp_size": pp, "dp_size": dp}
    options = {"bucket_size": 3000, "schedule": schedule}
    how = {"options": options, "micro_batches": 2}
    return [on_a_layout(partial(build, tied), sizes, BATCHES, half, **how) for tied in ties]


def check(layout, ties, schedule="1f1b"):
    ranks = torch.Size(layout).numel()
    for rank, found in enumerate(run_ranks(train, ranks, layout, ties, schedule, timeout=200)):
        for tied, figures in zip(ties, found, strict=True):
            require_alike(figures, expected(tied), BOUND, where=(layout, tied, rank))


def layouts(world_size):
    sizes_of_axis = [n for n in range(1, world_size + 1) if world_size % n == 0]
    every = itertools.product(sizes_of_axis, repeat=4)
    return [layout for layout in every if torch.Size(layout).numel() == world_size]


def label(layout):
    return "x".join(map(str, layout))


ALWAYS = [*layouts(1), *layouts(2), (1, 3, 1, 1)]  # of three stages one has two layers


@pytest.mark.parametrize("layout", [*ALWAYS, *today(layouts(4), 5)], ids=label)
def test_every_layout_of_1_to_4_ranks(layout):
    check(layout, (False, True))


@pytest.mark.parametrize("schedule", today(["1f1b", "interleaved_1f1b", "zb_v"], 3))
def test_all_four_axes_at_once(schedule):
    check((2, 2, 2, 2), (True,), schedule)

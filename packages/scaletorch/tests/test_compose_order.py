"""The order of positions is said to `parallelize` alone: a batch asks the model."""

import pytest
import torch

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.context_parallel import shard_batch
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

ORDERS = ("zigzag", "contiguous", "stripe")


def global_batch():
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def made(manager, order):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=64, hidden_size=32, num_layers=1)).double()
    return parallelize(model, manager, cp_layout=order, rehearse=False)


def losses(size):
    """Return the loss of each order, where all models and batches are there at a time."""
    manager = setup_process_group_manager(cp_size=size)
    try:
        models = [made(manager, order) for order in ORDERS]
        batches = [shard_global_batch(global_batch(), 1, model=model) for model in models]
        again = shard_global_batch(global_batch(), 1, model=models[0])
        found = [train_step(m, b, manager).item() for m, b in zip(models, batches, strict=True)]
        return [*found, train_step(models[0], again, manager).item()]
    finally:
        destroy_process_group_manager()


def test_the_batch_is_ordered_as_the_model_attends():
    ((expected, *_),) = run_ranks(losses, 1, 1)
    for found in run_ranks(losses, 2, 2):
        assert found == pytest.approx([expected] * 4, rel=1e-12)


def contradicted():
    manager = setup_process_group_manager(cp_size=2)
    try:
        model = made(manager, "contiguous")
        with pytest.raises(InvalidArgumentError, match="'zigzag' contradicts the model, which"):
            shard_global_batch(global_batch(), 1, model=model, cp_layout="zigzag")
        with pytest.raises(InvalidArgumentError, match=r"zigzag layout, .* contiguous one: .*ask"):
            train_step(model, shard_global_batch(global_batch(), 1, manager), manager)
        by_hand = shard_batch(global_batch(), manager.cp_group, layout="zigzag")
        with pytest.raises(InvalidArgumentError, match=r"shards to be contiguous.* sharded zigzag"):
            train_step(model, [by_hand], manager)
        said = shard_global_batch(global_batch(), 1, manager, cp_layout="contiguous")
        return train_step(model, said, manager).item()
    finally:
        destroy_process_group_manager()


def test_another_order_than_the_model_has_is_refused_on_every_rank():
    first, second = run_ranks(contradicted, 2)
    assert first == second


def test_a_batch_needs_a_grid_or_a_model():
    with pytest.raises(
        InvalidArgumentError, match="needs the grid: pass the manager, or as model="
    ):
        shard_global_batch(global_batch(), 1)

"""What options of compose do to the model and to batches, and who has to say them."""

import pytest
import torch
from training import llama, tokens

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import shard_batch
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear

ORDERS = ("zigzag", "contiguous", "stripe")


def made(manager, seed=0, **options):
    return parallelize(llama(seed).double(), manager, **options, rehearse=False)


def over_tp():
    """Return whether heads gather logits; weights that differ are refused, unless it is asked."""
    manager = setup_process_group_manager(tp_size=2)
    gathers = []
    for loss_parallel in (False, True):
        model = made(manager, loss_parallel=loss_parallel)
        columns = {n: m for n, m in model.named_modules() if isinstance(m, ColumnParallelLinear)}
        gathers += [m.gather_output for n, m in columns.items() if n.endswith("lm_head")]
    with pytest.raises(MismatchError, match="differ"):
        made(manager, manager.tp_rank)
    made(manager, manager.tp_rank, data_parallel={"init_sync": "none"})
    destroy_process_group_manager()
    return gathers


def test_logits_stay_sharded_for_a_parallel_loss_and_weights_are_compared():
    assert run_ranks(over_tp, 2) == [[True, False]] * 2


def rows():
    """Cut four sequences, with one number each."""
    manager = setup_process_group_manager(dp_size=2)
    batch = {name: torch.arange(12).view(4, 3) for name in ("input_ids", "labels")}
    shares = shard_global_batch(batch | {"weights": torch.arange(4)}, 2, manager)
    destroy_process_group_manager()
    return [[share[name].tolist() for name in ("labels", "weights")] for share in shares]


def test_each_data_parallel_rank_gets_its_own_rows():
    own = [[[[3 * row, 3 * row + 1, 3 * row + 2]], [row]] for row in range(4)]
    assert run_ranks(rows, 2) == [own[:2], own[2:]]


def losses(size):
    """Return the loss of each order, where all models and batches are there at a time."""
    manager = setup_process_group_manager(cp_size=size)
    models = [made(manager, cp_layout=order) for order in ORDERS]
    batches = [shard_global_batch(tokens(rows=2, length=16), 1, model=model) for model in models]
    again = shard_global_batch(tokens(rows=2, length=16), 1, model=models[0])
    found = [train_step(m, b, manager).item() for m, b in zip(models, batches, strict=True)]
    found.append(train_step(models[0], again, manager).item())
    destroy_process_group_manager()
    return found


def test_the_batch_is_ordered_as_the_model_attends():
    ((expected, *_),) = run_ranks(losses, 1, 1)
    for found in run_ranks(losses, 2, 2):
        assert found == pytest.approx([expected] * 4, rel=1e-12)


def contradicted():
    manager = setup_process_group_manager(cp_size=2)
    model = made(manager, cp_layout="contiguous")
    with pytest.raises(InvalidArgumentError, match=r"zigzag layout, .* contiguous one: .*ask"):
        train_step(model, shard_global_batch(tokens(rows=2, length=16), 1, manager), manager)
    by_hand = shard_batch(tokens(rows=2, length=16), manager.cp_group, layout="zigzag")
    with pytest.raises(InvalidArgumentError, match=r"shards to be contiguous.* sharded zigzag"):
        train_step(model, [by_hand], manager)
    cut = shard_global_batch(tokens(rows=2, length=16), 1, model=model)
    loss = train_step(model, cut, manager).item()
    destroy_process_group_manager()
    return loss


def test_another_order_than_the_model_has_is_refused_on_every_rank():
    first, second = run_ranks(contradicted, 2)
    assert first == second


def test_a_batch_needs_a_grid_or_a_model():
    with pytest.raises(InvalidArgumentError, match="needs the grid: pass the manager, or as model"):
        shard_global_batch(tokens(rows=2, length=16), 1)

"""Grid and order of positions are given once, to `parallelize`; later calls ask the model."""

import pytest
import torch
from training import llama, tokens

from scaletorch.compose import (
    check_replicas,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    global_grad_norm,
    nonfinite_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import shard_batch
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import ProcessGroupManager, setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear

ORDERS = ("zigzag", "contiguous", "stripe")


def made(manager, seed=0, **options):
    return parallelize(llama(seed).double(), manager, **options, rehearse=False)


def long_batch(**how):
    return shard_global_batch(tokens(rows=2, length=16), 1, **how)


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
    return gathers


def test_logits_stay_sharded_for_a_parallel_loss_and_weights_are_compared():
    assert run_ranks(over_tp, 2) == [[True, False]] * 2


def losses(size):
    """Return the loss of each order, where all models and batches are there at a time."""
    manager = setup_process_group_manager(cp_size=size)
    models = [made(manager, cp_layout=order) for order in ORDERS]
    batches = [long_batch(model=model) for model in models]
    again = long_batch(model=models[0])
    found = [train_step(m, b).item() for m, b in zip(models, batches, strict=True)]
    by_hand = shard_batch(tokens(rows=2, length=16), manager.cp_group, layout="zigzag")
    if size > 1:
        with pytest.raises(InvalidArgumentError, match=r"be contiguous.* sharded zigzag"):
            train_step(models[1], [by_hand])
    return [*found, train_step(models[0], again).item()]


def test_the_batch_is_ordered_as_the_model_attends():
    ((expected, *_),) = run_ranks(losses, 1, 1)
    for found in run_ranks(losses, 2, 2):
        assert found == pytest.approx([expected] * 4, rel=1e-12)


def both_forms():
    """Train with a grid that is not the current one, each call with and without it."""
    manager = ProcessGroupManager(tp_size=2, dp_size=2)
    model = parallelize(llama(), manager, rehearse=False)
    micro_batches = shard_global_batch(tokens(), 2, manager)
    short = train_step(model, micro_batches)
    model.zero_grad()
    assert short == train_step(model, micro_batches, manager)
    for call in (
        global_grad_norm, full_gradients, full_state_dict, nonfinite_gradients, check_replicas
    ):  # fmt: skip
        torch.testing.assert_close(call(model), call(model, manager), rtol=0, atol=0)
    assert clip_grad_norm_(model, 1e9) == clip_grad_norm_(model, 1e9, manager)
    return short.item()


def test_calls_know_the_grid_of_their_model():
    assert len(set(run_ranks(both_forms, 4))) == 1


def by_hand():
    """Return losses of a model put together by hand, on the current grid and on one passed."""
    with pytest.raises(StateError, match=r"pass manager=.*, or call setup_process_group_manager"):
        global_grad_norm(llama())
    other = ProcessGroupManager(dp_size=2)
    stage = PipelineParallel(llama(), group=other.pp_group)
    model = DataParallelBucket(stage, group=other.dp_group)
    micro_batches = shard_global_batch(tokens(), 1, other)
    found = [train_step(model, micro_batches, other).item()]
    model.zero_grad()
    setup_process_group_manager(dp_size=2)
    return [*found, train_step(model, micro_batches).item()]


def test_a_model_put_together_by_hand_is_on_the_current_grid():
    for first, second in run_ranks(by_hand, 2):
        assert first == second


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_replicas(torch.nn.Linear(1, 1), "x"), "a ProcessGroupManager.*a str"),
        (lambda: check_replicas(None), "model must be what parallelize returned, got NoneType"),
        (lambda: shard_global_batch(tokens(), 1), "needs the grid: pass the manager, or as model"),
    ],
)
def test_what_is_no_grid_or_no_model_is_refused(call, words):
    with pytest.raises(InvalidArgumentError, match=words):
        call()

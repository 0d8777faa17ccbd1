"""What options of compose do to the model and to batches."""

import pytest
import torch

from scaletorch.compose import parallelize, shard_global_batch
from scaletorch.dist.errors import MismatchError
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
    num_kv_heads=2, tie_embeddings=False,
)  # fmt: skip


def head_gathers(loss_parallel):
    manager = setup_process_group_manager(tp_size=2)
    model = parallelize(Llama(CONFIG), manager, loss_parallel=loss_parallel, rehearse=False)
    destroy_process_group_manager()
    columns = {n: m for n, m in model.named_modules() if isinstance(m, ColumnParallelLinear)}
    return [m.gather_output for n, m in columns.items() if n.endswith("lm_head")]


@pytest.mark.parametrize("loss_parallel", [False, True])
def test_logits_stay_sharded_where_the_loss_is_parallel(loss_parallel):
    assert run_ranks(head_gathers, 2, loss_parallel) == [[not loss_parallel]] * 2


def shares():
    manager = setup_process_group_manager(dp_size=2)
    batch = {
        "input_ids": torch.arange(12).view(4, 3),
        "labels": torch.arange(12).view(4, 3),
    }
    (share,) = shard_global_batch(batch, 1, manager)
    destroy_process_group_manager()
    return share["input_ids"].tolist(), share["labels"].tolist()


def test_each_data_parallel_rank_gets_its_own_rows():
    first, second = [[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]
    assert run_ranks(shares, 2) == [(first, first), (second, second)]


def numbers_of_rows():
    """Cut four sequences, with one number each."""
    manager = setup_process_group_manager(dp_size=2)
    batch = {name: torch.arange(12).view(4, 3) for name in ("input_ids", "labels")}
    shares = shard_global_batch(batch | {"weights": torch.arange(4)}, 2, manager)
    destroy_process_group_manager()
    return [share["weights"].tolist() for share in shares]


def test_numbers_of_rows_go_with_their_rows():
    assert run_ranks(numbers_of_rows, 2) == [[[0], [1]], [[2], [3]]]


def weights_of_their_own(options):
    """Put a model on two tensor-parallel ranks, of which each has drawn other weights."""
    manager = setup_process_group_manager(tp_size=2)
    torch.manual_seed(manager.tp_rank)
    try:
        parallelize(Llama(CONFIG), manager, **options, rehearse=False)
    except MismatchError as error:
        return str(error)
    finally:
        destroy_process_group_manager()
    return ""


def test_initial_weights_are_not_compared_where_that_is_switched_off():
    assert run_ranks(weights_of_their_own, 2, {"data_parallel": {"init_sync": "none"}}) == [""] * 2
    assert all("differ" in said for said in run_ranks(weights_of_their_own, 2, {}))

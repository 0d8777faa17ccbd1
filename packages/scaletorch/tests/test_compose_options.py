"""What options of compose do to the model and to batches."""

import pytest
import torch

from scaletorch.compose import parallelize, shard_global_batch
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import ColumnParallelLinear


def head_gathers(loss_parallel):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=2, tie_embeddings=False,
    )  # fmt: skip
    manager = setup_process_group_manager(tp_size=2)
    model = parallelize(Llama(config), manager, loss_parallel=loss_parallel)
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

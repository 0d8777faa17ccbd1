"""A small Llama, an optimizer and batches that tests of checkpoints train."""

import torch

from scaletorch.compose import shard_global_batch, train_step
from scaletorch.compose.state import gather_full
from scaletorch.dist import all_reduce, get_rank
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import parameter_shards
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)


def grid(layout):
    """Return the manager of dp, pp, cp and tp ranks, in place of an earlier one."""
    dp, pp, cp, tp = layout
    destroy_process_group_manager()
    return setup_process_group_manager(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp)


def build(seed=3, vocab_size=31, tied=False, layers=2):
    """Two key heads, which 4 tensor-parallel ranks replicate; 31 tokens, which divide unequally.

    So ranks of one tensor-parallel group have buckets of other lengths, cut elsewhere over dp.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=40, num_layers=layers,
        num_heads=8, num_kv_heads=2, tie_embeddings=tied,
    )  # fmt: skip
    model = Llama(config).double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    return model


def adamw(model, lr=1e-2, **options):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, eps=1e-3, **options)


def batch(step):
    tokens = torch.randint(30, (8, 17), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def train(model, optimizer, manager, step):
    optimizer.zero_grad()
    loss = train_step(model, shard_global_batch(batch(step), 1, manager), manager)
    optimizer.step()
    return loss.item()


def joined(model, manager, of_shard, dtype):
    """Return the full tensors, by names, of which `of_shard` returns what a rank has of a shard."""
    flat = {n: torch.zeros(p.numel(), dtype=dtype) for n, p in model.named_parameters()}
    for shard in parameter_shards(model):
        if not shard.replicated or get_rank(manager.cp_dp_group) == 0:
            flat[shard.name][shard.start : shard.stop] = of_shard(shard).detach().flatten()
    every = torch.cat([*flat.values()])
    all_reduce(every, group=manager.cp_dp_group)
    local = zip(model.named_parameters(), every.split([*map(len, flat.values())]), strict=True)
    return gather_full(model, {name: each.view_as(p) for (name, p), each in local}, manager)


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

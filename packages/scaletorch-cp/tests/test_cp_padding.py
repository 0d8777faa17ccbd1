"""Full attention over shards that may have padding is refused, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import (
    ShardedSequences,
    apply_context_parallel,
    unshard_sequence,
)

REFUSAL = "full attention would see the padding"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(16, 8)

    def forward(self, ids):
        x = self.tokens(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        return scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


def model_over(group, layout):
    return apply_context_parallel(Model(), group, layout=layout)


def shard(length, group, layout="zigzag"):
    sequences = ShardedSequences(length, layout=layout, group=group)
    return sequences.shard({"input_ids": torch.arange(length)[None]})["input_ids"]


def unrecorded():
    """Shards made by hand may be padded if they are zigzag."""
    world, ids = c10d.new_group(), torch.arange(8)[None]
    model_over(world, "contiguous")(ids)
    with pytest.raises(InvalidArgumentError, match=REFUSAL):
        model_over(world, "zigzag")(ids)
    shard(16, world, "contiguous")
    with pytest.raises(InvalidArgumentError, match=REFUSAL):
        model_over(world, "zigzag")(ids)


def recorded_anew():
    """Padding of earlier sequences is forgotten when others are sharded after their use."""
    world = c10d.new_group()
    model, ids = model_over(world, "zigzag"), shard(15, world)
    with pytest.raises(InvalidArgumentError, match=REFUSAL):
        model(ids)
    unshard_sequence(ids, group=world)
    model(shard(16, world))


def padded_on_one_rank():
    rank, world = c10d.get_rank(), c10d.new_group()
    model, ids = model_over(world, "zigzag"), shard(15 + rank, world)
    with pytest.raises(MismatchError if rank else InvalidArgumentError, match=REFUSAL):
        model(ids)


def all_cases():
    for case in (unrecorded, recorded_anew, padded_on_one_rank):
        case()


def test_full_attention_over_shards_that_may_be_padded_is_refused():
    run_ranks(all_cases, 2)

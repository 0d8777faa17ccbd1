"""Full attention over shards that may have padding is refused, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import distributed_test, relative_error
from scaletorch.parallel.context_parallel import (
    ShardedSequences,
    apply_context_parallel,
    unshard_sequence,
)

REFUSAL = r"full attention would see the padding .* that 2 x 2 divides .2 unless"


class Model(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.causal = nn.Embedding(16, 8), causal

    def forward(self, ids):
        x = self.tokens(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        out = scaled_dot_product_attention(x, x, x, is_causal=self.causal)
        return out.transpose(1, 2).flatten(2)


def model_over(group, layout="zigzag", **options):
    return apply_context_parallel(Model(**options), group, layout=layout)


def shard(length, group, layout="zigzag"):
    sequences = ShardedSequences(length, layout=layout, group=group)
    return sequences.shard({"input_ids": torch.arange(length)[None]})["input_ids"]


def refuse(model, ids):
    with pytest.raises(InvalidArgumentError, match=REFUSAL):
        model(ids)


def unrecorded():
    """Shards made by hand may be padded if they are zigzag."""
    world, ids = c10d.new_group(), torch.arange(8)[None]
    model_over(world, "contiguous")(ids)
    refuse(model_over(world), ids)
    shard(16, world, "contiguous")
    refuse(model_over(world), ids)


def without_padding():
    world = c10d.new_group()
    found = unshard_sequence(model_over(world)(shard(16, world)), group=world)
    assert relative_error(found, Model()(torch.arange(16)[None])) < 1e-6


def with_padding():
    """The shards of the next sequence are refused too, since attention may take the first ones."""
    for layout in ("zigzag", "contiguous", None):
        world = c10d.new_group()
        model = model_over(world, layout)
        ids, later = (shard(length, world, layout or "zigzag") for length in (15, 16))
        refuse(model, ids)
        refuse(model, later)


def after_causal_attention():
    """It ignores the padding of shards that a second model takes when others were sharded too."""
    world = c10d.new_group()
    ids = shard(15, world)
    model_over(world, causal=True)(ids)
    shard(16, world)
    refuse(model_over(world), ids)


def padded_on_one_rank():
    rank, world = c10d.get_rank(), c10d.new_group()
    model, ids = model_over(world), shard(15 + rank, world)
    with pytest.raises(MismatchError if rank else InvalidArgumentError, match=REFUSAL):
        model(ids)


@distributed_test(2)
def test_full_attention_over_shards_that_may_be_padded_is_refused():
    cases = (unrecorded, without_padding, with_padding, after_causal_attention, padded_on_one_rank)
    for case in cases:
        case()

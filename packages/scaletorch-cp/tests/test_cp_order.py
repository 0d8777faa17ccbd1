"""The order of shards is said once: what is told none takes it, what is told another is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError, ScaletorchError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks
from scaletorch.parallel.context_parallel import (
    LAYOUTS,
    ShardedSequences,
    apply_context_parallel,
    attention,
    contiguous,
    positions,
    ring_attention,
    shard_batch,
    shard_sequence,
    unshard_sequence,
    update_rope_for_context_parallel,
)

LENGTH = 16
IDS = {"input_ids": torch.arange(LENGTH)[None]}


def _qkv(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 1, 2, LENGTH, 4, generator=generator, dtype=torch.float64).unbind()


class Layer(nn.Module):
    """Causal attention of its input to itself."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def _error_of_default(name, layout):
    """Return how far attention by nothing but defaults is from that of the whole."""
    group, (q, k, v) = c10d.new_group(), _qkv()
    said = {} if layout is None else {"layout": layout}
    shards = [shard_sequence(x, 2, group, **said) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "attention":
        out = attention(*shards, causal=True, group=group)
    elif name == "ring_attention":
        out = ring_attention(*shards, is_causal=True, group=group)
    else:
        out = apply_context_parallel(Layer(), group)(shards[0])
        expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return relative_error(unshard_sequence(out, 2, group), expected)


def _errors_of_defaults():
    names = ("attention", "ring_attention", "apply_context_parallel")
    return {(n, layout): _error_of_default(n, layout) for n in names for layout in (None, *LAYOUTS)}


def test_attention_takes_the_order_in_which_a_sequence_was_sharded():
    for errors in run_ranks(_errors_of_defaults, 2):
        for case, error in errors.items():
            assert error < 1e-12, case


def _taken(name, group, layout):
    """Call what is given shards of `group` in an order."""
    q, k, v = (x[:, :, : LENGTH // c10d.get_world_size()] for x in _qkv())
    table = torch.ones(LENGTH, 4)
    calls = {
        "attention": lambda: attention(q, k, v, causal=True, layout=layout, group=group),
        "windowed": lambda: attention(q, k, v, window=3, layout=layout, group=group),
        "ring_attention": lambda: ring_attention(q, k, v, None, True, group, layout=layout),
        "model": lambda: apply_context_parallel(Layer(), group, layout=layout)(q),
        "unshard": lambda: unshard_sequence(q, 2, group, layout=layout),
        "positions": lambda: positions(LENGTH, group, layout=layout),
        "rope": lambda: update_rope_for_context_parallel(table, table, group, layout=layout),
    }
    return calls[name]()


TAKE = ["attention", "windowed", "ring_attention", "model", "unshard", "positions", "rope"]


def _contradicted(group, name, by, sharded, taken):
    if by == "shard_batch":
        shard_batch(IDS, group, layout=sharded)
    elif by == "shard_sequence":
        shard_sequence(IDS["input_ids"], 1, group, layout=sharded)
    else:
        ShardedSequences(LENGTH, layout=sharded, group=group).shard(IDS)
    match = rf"rank \d.*shards to be {taken}.* sharded {sharded}: use one layout"
    with pytest.raises(InvalidArgumentError, match=match):
        _taken(name, group, taken)
    _taken(name, group, sharded)


@distributed_test(2, timeout=200)
def test_another_order_than_the_shards_have_is_refused_on_every_rank():
    for by in ("shard_batch", "shard_sequence", "ShardedSequences"):
        for at, name in enumerate(TAKE):
            sharded, taken = (("contiguous", "zigzag"), ("zigzag", "stripe"))[at % 2]
            _contradicted(c10d.new_group(), name, by, sharded, taken)
    group = c10d.new_group()
    shard_batch(IDS, group, layout="contiguous")
    other = "zigzag" if c10d.get_rank() else "contiguous"  # of one rank alone
    with pytest.raises(ScaletorchError, match=r"shards to be zigzag|its own error"):
        _taken("attention", group, other)


@distributed_test(2)
def test_the_order_of_shards_made_by_hand_must_be_said():
    for name in ("attention", "windowed", "unshard", "positions", "rope"):
        group = c10d.new_group()
        with pytest.raises(InvalidArgumentError, match=r"these shards is unknown.*zigzag"):
            _taken(name, group, None)
        _taken(name, group, "contiguous")


def _needs_no_order():
    """Return errors over shards made by hand: of full attention in any order, else contiguous."""
    (q, k, v), group, rank = _qkv(), c10d.new_group(), c10d.get_rank()
    full = attention(*(x[:, :, rank::2] for x in (q, k, v)), group=c10d.new_group())
    pairs = [(full, F.scaled_dot_product_attention(q, k, v)[:, :, rank::2])]
    own = [x.chunk(2, 2)[rank] for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(2, 2)[rank]
    pairs.append((ring_attention(*own, is_causal=True, group=group), expected))
    same = F.scaled_dot_product_attention(q, q, q, is_causal=True).chunk(2, 2)[rank]
    pairs.append((apply_context_parallel(Layer(), group)(own[0]), same))
    return [relative_error(*pair) for pair in pairs]


def test_full_attention_needs_no_order_and_ring_attention_and_models_take_contiguous():
    for errors in run_ranks(_needs_no_order, 2):
        assert max(errors) < 1e-12


def _several():
    group, (q, k, v) = c10d.new_group(), _qkv()
    first = [shard_sequence(x, 2, group, layout="zigzag") for x in (q, k, v)]
    second = [shard_sequence(x, 2, group, layout="contiguous") for x in (q, k, v)]
    with pytest.raises(InvalidArgumentError, match="several layouts, contiguous and zigzag; pass"):
        attention(*first, causal=True, group=group)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    outs = [
        attention(*first, causal=True, layout="zigzag", group=group),
        attention(*second, causal=True, layout="contiguous", group=group),
    ]
    shard_sequence(q, 2, group, layout="contiguous")  # another sequence: no zigzag is left
    with pytest.raises(InvalidArgumentError, match="shards to be zigzag"):
        attention(*first, causal=True, layout="zigzag", group=group)
    outs.append(attention(*first, causal=True, layout=LAYOUTS["zigzag"](LENGTH, 2), group=group))
    wholes = [
        unshard_sequence(out, 2, group, layout=LAYOUTS[order](LENGTH, 2))
        for out, order in zip(outs, ("zigzag", "contiguous", "zigzag"), strict=True)
    ]
    return [relative_error(whole, expected) for whole in wholes]


def test_sequences_in_several_orders_say_which():
    for errors in run_ranks(_several, 2):
        assert max(errors) < 1e-12


def test_one_rank_has_every_order():
    q, k, v = _qkv()
    shard_sequence(q, 2, layout="contiguous")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = attention(q, k, v, causal=True, layout="zigzag")
    assert relative_error(out, expected) < 1e-12
    assert positions(LENGTH).tolist() == contiguous(LENGTH, 1).positions(0).tolist()

"""Ulysses over parts of the ranks and a ring across them, over one group or two."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from scaletorch.dist.errors import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.context_parallel import LAYOUTS, attention, choose_method
from scaletorch.parallel.context_parallel.layouts.layout import joined

LENGTH = 45  # pads in every layout


def pair(size):
    """Make this rank's part of `size` neighbours, and its ring across the parts."""
    ranks = list(range(dist.get_world_size()))
    parts = [ranks[first : first + size] for first in ranks[::size]]
    rings = [ranks[place::size] for place in range(size)]
    made = [[(group, dist.new_group(group)) for group in groups] for groups in (parts, rings)]
    return tuple(
        next(group for held, group in groups if dist.get_rank() in held) for groups in made
    )


def inputs(heads, kv_heads):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, h, LENGTH, 8, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def share(x, layout):
    padded = F.pad(x, (0, 0, 0, layout.padded_length - LENGTH), value=7.0)
    return padded[:, :, layout.positions(dist.get_rank())].clone()


def attended(tensors, layout, method, group):
    """Return this rank's output and gradients."""
    q, k, v = (share(x, layout).requires_grad_() for x in tensors[:3])
    out = attention(q, k, v, causal=True, window=20, layout=layout, method=method, group=group)
    out.backward(share(tensors[3], layout))
    return [out.detach(), q.grad, k.grad, v.grad]


def compared(kind, part, heads, kv_heads):
    """Return the largest relative error, and whether one group of all gives the same bits."""
    tensors = inputs(heads, kv_heads)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    row, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    mask = (key <= row) & (row - key < 20)
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    expected.backward(tensors[3])
    layout = LAYOUTS[kind](LENGTH, dist.get_world_size())
    own = attended(tensors, layout, "hybrid", pair(part))
    wanted = [expected.detach(), *(x.grad for x in leaves)]
    held = layout.positions(dist.get_rank())
    real = held < LENGTH
    error = worst(
        relative_error(a[:, :, real], b[:, :, held[real]], scale=b)
        for a, b in zip(own, wanted, strict=True)
    )
    same = attended(tensors, layout, "hybrid", dist.group.WORLD)
    return error, all(torch.equal(a, b) for a, b in zip(own, same, strict=True))


@pytest.mark.parametrize("kind", list(LAYOUTS))
@pytest.mark.parametrize(
    ("ranks", "part", "heads", "kv_heads"),
    [(4, 2, 4, 2), (4, 4, 4, 4), (4, 1, 3, 3), (6, 3, 6, 3), (8, 4, 8, 4), (8, 2, 6, 6)],
)
def test_two_groups_of_any_shape(kind, ranks, part, heads, kv_heads):
    for error, same in run_ranks(compared, ranks, kind, part, heads, kv_heads):
        assert error < 1e-12
        assert same  # heads divide over as many ranks in the pair as over the one group


def replicated(part):
    """Return the largest error of key/value heads fewer than the ranks of a part."""
    return compared("zigzag", part, 4, 1)[0]


def test_heads_fewer_than_ranks_of_a_part_are_replicated():
    assert worst(run_ranks(replicated, 4, 2)) < 1e-12


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_joined_shares_are_those_of_fewer_ranks(kind):
    layout = joined(LAYOUTS[kind](48, 8), 8)
    assert layout.positions(0).tolist() == list(range(48))
    pairs = joined(LAYOUTS[kind](48, 8), 2)
    for rank in range(4):
        own = [LAYOUTS[kind](48, 8).positions(r) for r in (2 * rank, 2 * rank + 1)]
        assert sorted(pairs.positions(rank).tolist()) == sorted(torch.cat(own).tolist())


def differing(_):
    q, k, v, _ = inputs(4, 2)
    with pytest.raises(MismatchError) as caught:
        attention(q, k, v, scale=0.1 if dist.get_rank() == 3 else 0.2, group=pair(2))
    return str(caught.value)


def test_ranks_of_two_groups_that_differ_are_told_on_every_rank():
    for message in run_ranks(differing, 4, None):
        assert "the ranks disagree on this call of context-parallel attention" in message
        assert "+ scale 0.1" in message


def refused(_):
    q, k, v, _ = inputs(4, 2)
    groups = pair(2)
    with pytest.raises(InvalidArgumentError, match="a pair of groups is for method='hybrid'"):
        attention(q, k, v, method="ring", group=groups)
    with pytest.raises(InvalidArgumentError, match="divides heads over 2 ranks"):
        attention(q[:, :3], k[:, :1], v[:, :1], method="hybrid", group=groups)
    q.requires_grad_()
    out = attention(q, k, v, method="hybrid", group=groups)
    with pytest.raises(StateError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def crossed(_):
    """Rings that pass through one place of a part and another place of the next."""
    q, k, v, _ = inputs(4, 2)
    made = [
        [(ranks, dist.new_group(ranks)) for ranks in ranks_of]
        for ranks_of in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    ]
    groups = tuple(next(g for held, g in made_of if dist.get_rank() in held) for made_of in made)
    with pytest.raises(InvalidArgumentError, match="a pair of groups must cross"):
        attention(q, k, v, method="hybrid", group=groups)


def test_groups_that_do_not_cross_are_refused():
    run_ranks(crossed, 4, None)


def test_what_hybrid_cannot_do_is_refused():
    run_ranks(refused, 4, None)


def test_auto_takes_hybrid_where_it_sends_less():
    q, k = torch.empty(1, 8, 4096, 64), torch.empty(1, 4, 4096, 64)
    assert choose_method(q, k, 8) == (
        "hybrid",
        "it sends 26 heads of a rank's positions, a ring 56",
    )
    assert choose_method(q, k, 4)[0] == "ulysses"
    assert choose_method(q[:, :3], k[:, :3], 8)[0] == "ring"

"""Conversions between placements keep the whole tensor, and their backward its whole gradient."""

import pytest
import torch
import torch.distributed as dist

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.placement import (
    Cut,
    Invariant,
    ModelView,
    Partial,
    Replicate,
    Shard,
    Varying,
    convert,
    modules_within,
    shard_sizes,
)
from scaletorch.parallel.placement.conversion import CONVERSIONS

WHOLE = torch.arange(320.0, dtype=torch.float64).view(4, 10, 8).sin()
GRADIENT = torch.arange(320.0, dtype=torch.float64).view(4, 10, 8).cos()
DUAL = {Replicate: Partial, Partial: Replicate}


def gradient_of(placement):
    return DUAL[type(placement)]() if type(placement) in DUAL else placement


def local(whole, placement, rank, size):
    """Return what a rank has of a tensor."""
    if isinstance(placement, Shard):
        sizes = placement.sizes or shard_sizes(whole.shape[placement.dim], size)
        return whole.split(sizes, placement.dim)[rank]
    share = (rank + 1) / (size * (size + 1) / 2)  # of every rank another
    return whole * share if isinstance(placement, Partial) else whole


def whole_of(locals_, placement):
    """Return the tensor of which ranks have these; replicas are equal to the bit."""
    if isinstance(placement, Shard):
        return torch.cat(locals_, placement.dim)
    if isinstance(placement, Partial):
        return torch.stack(locals_).sum(0)
    assert all(torch.equal(each, locals_[0]) for each in locals_)
    return locals_[0]


def pairs(size):
    """Every row of the table but those that do nothing, with equal and with unequal shards."""
    yield Shard(0), Shard(2)
    for src, dst in CONVERSIONS:
        kinds = {src, dst} - {Varying}
        if len(kinds) == 2:
            for shard in (Shard(0), Shard(-2, shard_sizes(10, size)))[: 1 + (Shard in kinds)]:
                yield tuple(shard if kind is Shard else kind() for kind in (src, dst))


def converted(size):
    rank, found = dist.get_rank(), []
    for src, dst in pairs(size):
        x = local(WHOLE, src, rank, size).clone().requires_grad_()
        out = convert(x, src, dst, dist.group.WORLD)
        out.backward(local(GRADIENT, gradient_of(dst), rank, size).clone())
        found.append((src, dst, out.detach(), x.grad))
    with pytest.raises(ValueError, match="where it is") as refused:
        convert(WHOLE, Invariant(), Partial(), where="where it is")
    with pytest.raises(ValueError, match="needs equal shards"):
        convert(WHOLE, Shard(0), Shard(1, (8, 2)))
    return found, str(refused.value)


@pytest.mark.parametrize("size", [2, 4])
def test_each_conversion_and_its_transpose(size):
    results = run_ranks(converted, size, size)
    for rows in zip(*(found for found, _ in results), strict=True):
        src, dst = rows[0][:2]
        out = whole_of([row[2] for row in rows], dst)
        torch.testing.assert_close(out, WHOLE, msg=lambda text: f"{src} to {dst}: {text}")  # noqa: B023
        grad = whole_of([row[3] for row in rows], gradient_of(src))
        torch.testing.assert_close(grad, GRADIENT, msg=lambda text: f"{src} to {dst}: {text}")  # noqa: B023
    for rank, (_, message) in enumerate(results):
        assert f"rank {rank}" in message
        assert "is Invariant() and is needed as Partial()" in message
        assert message.endswith("Invariant converts to Replicate, Shard")


def test_what_no_rank_has_to_send():
    for src, dst in ((Shard(0), Varying()), (Varying(), Partial()), (Shard(1), Shard(1))):
        assert convert(WHOLE, src, dst) is WHOLE


def test_a_cut_joins_what_it_took_apart():
    cut = Cut.of((4, 3), (0, 0, 1)).times(2)
    assert (cut.whole, cut.sizes, cut.replicated, cut.in_order) == (14, (8, 8, 6), True, False)
    assert [cut.owners(rank) for rank in range(3)] == [(0,), (0,), (2,)]
    whole = torch.arange(14)
    joined = torch.cat([cut.take(whole, 0, rank) for rank in range(3)])
    assert torch.equal(cut.arrange(joined, 0), whole)


def test_a_view_names_modules_once_and_all_owners_of_a_tied_parameter():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4), torch.nn.Tanh())
    model[1].weight = model[0].weight
    model.append(model[2])
    view = ModelView(model)
    assert [*view.names.values()] == ["", "0", "1", "2"]
    assert view.owners[model[0].weight] == [(model[0], "weight"), (model[1], "weight")]
    assert view.owners[model[1].bias] == [(model[1], "bias")]
    assert modules_within([model[1], model[2]]) == {model[1], model[2]}
    assert modules_within([model]) == {*view.names}

"""Who holds which positions: sequences, batches, positions and rotary tables."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import (
    LAYOUTS,
    positions,
    shard_batch,
    shard_sequence,
    stripe,
    unshard_sequence,
    update_rope_for_context_parallel,
    zigzag,
)


def _round_trip(layout):
    world = c10d.new_group()  # whose order nobody has said
    x = torch.arange(2 * 12 * 3).reshape(2, 12, 3)
    shard = shard_sequence(x, group=world, **layout)
    last = shard_sequence(x.mT, -1, world, **layout)
    assert torch.equal(last, shard.mT)
    assert torch.equal(unshard_sequence(shard, group=world), x)
    assert torch.equal(unshard_sequence(last, -1, world), x.mT)
    return shard, positions(12, world)


@pytest.mark.parametrize("size", [2, 3])
def test_contiguous_shards_are_in_rank_order(size):
    whole = torch.arange(2 * 12 * 3).reshape(2, 12, 3)
    results = run_ranks(_round_trip, size, {"layout": "contiguous"})
    assert torch.equal(torch.cat([shard for shard, _ in results], 1), whole)
    assert torch.equal(torch.cat([ids for _, ids in results]), torch.arange(12))


def test_shards_are_zigzag_by_default():
    for rank, (_, ids) in enumerate(run_ranks(_round_trip, 2, {})):
        assert torch.equal(ids, zigzag(12, 2).positions(rank))


def _any_layout(kind, as_object):
    """Share out 12 positions and join them; return this rank's shard and positions."""
    world, x = c10d.new_group(), torch.arange(2 * 12 * 3).reshape(2, 12, 3)
    layout = LAYOUTS[kind](12, world.size()) if as_object else kind
    shard = shard_sequence(x, group=world, layout=layout)
    last = shard_sequence(x.mT, -1, world, layout=layout)
    assert torch.equal(last, shard.mT)
    assert torch.equal(unshard_sequence(shard, group=world, layout=layout), x)
    assert torch.equal(unshard_sequence(last, -1, world, layout=layout), x.mT)
    assert torch.equal(shard_batch({"input_ids": x[..., 0]}, world, layout=layout)["input_ids"],
                       shard[..., 0])  # fmt: skip
    held = positions(12, world, layout=layout)
    assert torch.equal(shard, x[:, held])
    cos, sin = update_rope_for_context_parallel(x[0], -x[0], world, length=12, layout=kind)
    assert torch.equal(cos, x[0, held])
    assert torch.equal(sin, -cos)
    return held.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "as_object"), [("zigzag", False), ("stripe", True)])
def test_shards_of_a_layout(kind, as_object, size):
    expected = [LAYOUTS[kind](12, size).positions(rank).tolist() for rank in range(size)]
    assert run_ranks(_any_layout, size, kind, as_object) == expected


def _padded(kind):
    world = c10d.new_group()
    layout = LAYOUTS[kind](13, world.size())
    x = torch.arange(layout.padded_length)
    shard = shard_sequence(x, 0, world, layout=layout)
    joined = [
        unshard_sequence(shard, 0, world, layout=layout),
        unshard_sequence(shard, 0, world, layout=kind, length=13),
    ]
    assert all(torch.equal(whole, torch.arange(13)) for whole in joined)
    return shard.tolist()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_padding_is_shared_out_and_not_joined(kind):
    for rank, shard in enumerate(run_ranks(_padded, 2, kind)):
        assert shard == LAYOUTS[kind](13, 2).positions(rank).tolist()


def _gradients(layout):
    world = c10d.new_group()
    x = torch.arange(8.0, requires_grad=True)
    (shard_sequence(x, 0, world, layout=layout) ** 2).sum().backward()
    shard = torch.ones(4, requires_grad=True)
    (unshard_sequence(shard, 0, world, layout=layout) * torch.arange(8.0)).sum().backward()
    return x.grad, shard.grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_whole_and_shard(layout):
    for rank, (whole, shard) in enumerate(run_ranks(_gradients, 2, layout)):
        assert torch.equal(whole, 2 * torch.arange(8.0))
        assert torch.equal(shard, LAYOUTS[layout](8, 2).positions(rank).float())


def _batch(batch, layout="contiguous"):
    kept = {name: value.clone() for name, value in batch.items() if torch.is_tensor(value)}
    shard = shard_batch(batch, c10d.new_group(), layout=layout)
    assert all(torch.equal(batch[name], value) for name, value in kept.items())
    assert all(value.is_contiguous() for value in shard.values() if torch.is_tensor(value))
    return shard


def test_batch_is_cut_and_gets_positions():
    ids = torch.randint(99, (3, 8))
    batch = {
        "input_ids": ids,
        "labels": ids + 1,
        "weights": torch.rand(3, 8),
        "document": torch.arange(3),
        "name": "text",
    }
    shards = run_ranks(_batch, 4, batch)
    for name in ("input_ids", "labels", "weights"):
        assert torch.equal(torch.cat([shard[name] for shard in shards], 1), batch[name])
    ids = torch.cat([shard["position_ids"] for shard in shards], 1)
    assert torch.equal(ids, torch.arange(8).repeat(3, 1))
    assert all(torch.equal(shard["document"], torch.arange(3)) for shard in shards)
    assert all(shard["name"] == "text" for shard in shards)


@pytest.mark.parametrize("layout", ["zigzag", "stripe"])
def test_batch_is_cut_by_any_layout(layout):
    ids = torch.randint(99, (3, 12))
    shards = run_ranks(_batch, 2, {"input_ids": ids, "labels": ids + 1, "name": "text"}, layout)
    for rank, shard in enumerate(shards):
        held = LAYOUTS[layout](12, 2).positions(rank)
        assert torch.equal(shard["input_ids"], ids[:, held])
        assert torch.equal(shard["labels"], ids[:, held] + 1)
        assert torch.equal(shard["position_ids"], held.repeat(3, 1))
        assert shard["name"] == "text"


@pytest.mark.parametrize("rows", [1, 3])
def test_given_positions_are_cut(rows):
    ids = torch.zeros(3, 8, dtype=torch.int64)
    given = torch.arange(8).flip(0).repeat(rows, 1)
    shards = run_ranks(_batch, 2, {"input_ids": ids, "position_ids": given})
    assert torch.equal(torch.cat([shard["position_ids"] for shard in shards], 1), given)


def test_one_process_gets_the_whole_with_positions():
    shard = shard_batch({"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": None})
    assert shard["input_ids"].shape == (2, 5)
    assert shard["labels"] is None
    assert torch.equal(shard["position_ids"], torch.arange(5).repeat(2, 1))
    x = torch.arange(5)
    assert torch.equal(shard_sequence(x, 0), x)
    assert torch.equal(unshard_sequence(x, 0), x)
    assert torch.equal(positions(5), x)


def _uneven():
    world, messages = c10d.new_group(), []
    ids, table, whole = torch.ones(1, 2, dtype=torch.int64), torch.ones(13, 2), "contiguous"
    calls = [
        lambda: shard_sequence(torch.ones(1, 10), group=world, layout=whole),
        lambda: shard_batch({"input_ids": ids}, world, layout=whole),
        lambda: positions(11, world, layout=whole),
        lambda: update_rope_for_context_parallel(table, table, world, layout=whole),
        lambda: shard_sequence(torch.ones(1, 9), group=world, layout="zigzag"),
        lambda: positions(3, world, layout="zigzag"),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_a_length_that_does_not_divide_names_those_near_it_that_do():
    for rank, messages in enumerate(run_ranks(_uneven, 3)):
        nearby = ("9 and 12", "3", "9 and 12", "12 and 15", "6 and 12", "6")
        for message, near in zip(messages, nearby, strict=True):
            assert message.startswith(f"rank {rank}: a sequence of")
            assert message.endswith(f" layout; lengths near it that do: {near}")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: shard_sequence(x, layout="ring"), "contiguous, zigzag, stripe; it is 'ring'"),
        (lambda x: shard_sequence(x, layout=zigzag(13, 1)), "13 positions .* 13 .* has 12"),
        (lambda x: positions(12, layout=stripe(12, 2)), "each of 2 ranks 6.* the group 1 ranks"),
        (lambda x: unshard_sequence(x, layout="zigzag", length=13), "1 ranks 13.* has 12, of 13"),
        (lambda x: unshard_sequence(x, layout=stripe(12, 1), length=11), "12 pos.* has 12, of 11"),
        (lambda x: unshard_sequence(x[:, :11], layout=zigzag(12, 1)), "12 pos.* has 11, of 12"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused(call, match):
    with pytest.raises(InvalidArgumentError, match=match):
        call(torch.ones(1, 12))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"labels": torch.ones(1, 2)}, "needs input_ids .*NoneType"),
        ({"input_ids": [1, 2]}, "needs input_ids .*list"),
        ({"input_ids": torch.ones(4)}, r"needs input_ids \[B, L\]; it has \[4\]"),
        (
            {"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 5)},
            r"labels .*\[1, 4\].*\[1, 5\]",
        ),
        (
            {"input_ids": torch.ones(2, 4), "position_ids": torch.ones(4)},
            r"position_ids .*is \[4\]",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, match):
    with pytest.raises(InvalidArgumentError, match=match):
        shard_batch(batch)


def test_no_such_dim_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"no sequence dim 2 in a tensor of \[3, 4\]"):
        shard_sequence(torch.ones(3, 4), 2)
    with pytest.raises(InvalidArgumentError, match="no sequence dim -3"):
        unshard_sequence(torch.ones(3, 4), -3)


def _tables(shape, length):
    cos = torch.arange(24.0).reshape(shape)
    group = c10d.new_group()  # whose order nobody has said
    return update_rope_for_context_parallel(cos, -cos, group, length=length, layout="contiguous")


@pytest.mark.parametrize(("shape", "length"), [((12, 2), None), ((2, 6, 2), None), ((12, 2), 8)])
def test_rope_tables_are_cut_by_position(shape, length):
    whole = torch.arange(24.0).reshape(shape)[..., :length, :]
    parts = run_ranks(_tables, 2, shape, length)
    assert torch.equal(torch.cat([cos for cos, _ in parts], -2), whole)
    assert torch.equal(torch.cat([sin for _, sin in parts], -2), -whole)


def test_rope_tables_that_do_not_fit_are_refused():
    table = torch.ones(6, 2)
    with pytest.raises(InvalidArgumentError, match=r"\[6, 2\] and \[4, 2\]"):
        update_rope_for_context_parallel(table, table[:4])
    with pytest.raises(InvalidArgumentError, match=r"\[2\] and \[2\]"):
        update_rope_for_context_parallel(table[0], table[0])
    with pytest.raises(InvalidArgumentError, match=r"length must be 1 to 6, .*it is 7"):
        update_rope_for_context_parallel(table, table, length=7)

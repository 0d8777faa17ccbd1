"""Shards of sequences of any length, of batches, positions and rotary tables."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.context_parallel import (
    LAYOUTS,
    ShardedSequences,
    positions,
    shard_batch,
    shard_sequence,
    stripe,
    unshard_sequence,
    update_rope_for_context_parallel,
    zigzag,
)


def _every_layout():
    for kind in LAYOUTS:
        for said in (kind, LAYOUTS[kind](12, c10d.get_world_size())):
            _round_trip(kind, said)
    x, world = torch.arange(24).view(2, 12), c10d.new_group()
    assert torch.equal(shard_sequence(x, group=world), x[:, positions(12, world)])
    assert torch.equal(positions(12, world), _held("zigzag"))  # by default


def _held(kind):
    return LAYOUTS[kind](12, c10d.get_world_size()).positions(c10d.get_rank())


def _round_trip(kind, said):
    """Share out 12 positions and join them, where nobody has said an order before."""
    world, x, held = c10d.new_group(), torch.arange(2 * 12 * 3).reshape(2, 12, 3), _held(kind)
    assert torch.equal(shard_batch({"input_ids": x[..., 0]}, world, layout=said)["input_ids"],
                       x[:, held, 0])  # fmt: skip
    shard = shard_sequence(x, group=world, layout=said)
    last = shard_sequence(x.mT, -1, world, layout=said)
    assert torch.equal(shard, x[:, held])
    assert torch.equal(last, shard.mT)
    for layout in (None, said):
        assert torch.equal(unshard_sequence(shard, group=world, layout=layout), x)
        assert torch.equal(unshard_sequence(last, -1, world, layout=layout), x.mT)
        assert torch.equal(positions(12, world, layout=layout), held)
    table = torch.cat([x, x], 1)  # longer than the sequence
    cos, sin = update_rope_for_context_parallel(table, -table, world, length=12, layout=kind)
    assert torch.equal(cos, table[:, held])
    assert torch.equal(sin, -cos)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_of_every_layout(size):
    run_ranks(_every_layout, size)


@distributed_test(2)
def test_padding_is_shared_out_and_not_joined_and_gradients_are_of_whole_and_shard():
    world, rank = c10d.new_group(), c10d.get_rank()
    for kind, make in LAYOUTS.items():
        layout = make(13, 2)
        shard = shard_sequence(torch.arange(layout.padded_length), 0, world, layout=layout)
        assert torch.equal(shard, layout.positions(rank))
        for said in ({"layout": layout}, {"layout": kind, "length": 13}):
            assert torch.equal(unshard_sequence(shard, 0, world, **said), torch.arange(13))
        x, layout = torch.arange(8.0, requires_grad=True), make(8, 2)
        (shard_sequence(x, 0, world, layout=layout) ** 2).sum().backward()
        assert torch.equal(x.grad, 2 * torch.arange(8.0))
        shard = torch.ones(4, requires_grad=True)
        (unshard_sequence(shard, 0, world, layout=layout) * torch.arange(8.0)).sum().backward()
        assert torch.equal(shard.grad, layout.positions(rank).float())


@distributed_test(2)
def test_batches_are_cut_and_get_positions_or_have_theirs_cut():
    ids, rank = torch.arange(36).view(3, 12), c10d.get_rank()
    batch = {"input_ids": ids, "labels": ids + 1, "weights": ids / 7, "document": torch.arange(3)}
    for kind, make in LAYOUTS.items():
        held, group = make(12, 2).positions(rank), c10d.new_group()
        shard = shard_batch({**batch, "name": "text"}, group, layout=kind)
        assert torch.equal(ids, torch.arange(36).view(3, 12)), "an input was changed"
        for name in ("input_ids", "labels", "weights"):
            assert torch.equal(shard[name], batch[name][:, held])
            assert shard[name].is_contiguous()
        assert torch.equal(shard["position_ids"], held.repeat(3, 1))
        assert torch.equal(shard["document"], torch.arange(3))
        assert shard["name"] == "text"
        for rows in (1, 3):
            given = {"input_ids": ids, "position_ids": torch.arange(12).flip(0).repeat(rows, 1)}
            found = shard_batch(given, group, layout=kind)["position_ids"]
            assert torch.equal(found, given["position_ids"][:, held])


def test_one_process_gets_the_whole_with_positions():
    shard = shard_batch({"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": None})
    assert shard["labels"] is None
    assert torch.equal(shard["position_ids"], torch.arange(5).repeat(2, 1))


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
        (lambda x: positions(12, layout=stripe(12, 2)), "of 2 ranks 6.* of 1 ranks has 12"),
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


VOCAB, LENGTH = 13, 17
PACKED = (0, 1, 7, 7, 12, 17)


def _batch():
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=random)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.2, -100)
    return {"input_ids": ids, "labels": labels}


def test_labels_that_are_shifted_already_are_cut_as_they_are():
    batch = _batch()
    mine = ShardedSequences(LENGTH, cu_seqlens=PACKED).shard(batch, shifted=True)
    assert torch.equal(mine["labels"], batch["labels"])


def _means(sums, counts):
    """Return the loss of this rank's sum and count, and the gradient of the sum."""
    sequences = ShardedSequences(8, group=c10d.group.WORLD)
    rank = c10d.get_rank()
    own = torch.tensor(sums[rank], dtype=torch.float64, requires_grad=True)
    loss = sequences.loss(own, counts[rank])
    loss.backward()
    return loss.item(), own.grad.item()


@pytest.mark.parametrize(
    ("sums", "counts", "expected"),
    [((6.0, 3.0), (4, 0), (2.25, 0.25)), ((0.0, 0.0), (0, 0), (0.0, 0.0))],
)
def test_the_loss_is_the_mean_over_all_ranks_tokens(sums, counts, expected):
    assert run_ranks(_means, 2, sums, counts) == [expected, expected]
    own = torch.tensor(sums[0], requires_grad=True)
    loss = ShardedSequences(8).loss(own, counts[0])
    loss.backward()
    assert loss == (sums[0] / counts[0] if counts[0] else 0)
    assert own.grad == (1 / counts[0] if counts[0] else 0)


def test_documents_that_a_batch_tells_as_well_are_passed_on():
    told = {"cu_seq_lens_q": torch.tensor(PACKED), "cu_seqlens": torch.tensor(PACKED)}
    mine = ShardedSequences(LENGTH, cu_seqlens=PACKED).shard({**_batch(), **told})
    assert all(mine[name] is value for name, value in told.items())


def _told_twice(documents):
    told = {"cu_seq_lens_k": torch.tensor([0, 6, LENGTH])}
    ShardedSequences(LENGTH, cu_seqlens=documents).shard({**_batch(), **told})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ShardedSequences(0), "length .* at least 1; it got length 0"),
        (lambda: ShardedSequences(4, layout="ring"), "contiguous, zigzag, stripe; it is 'ring'"),
        (lambda: ShardedSequences(4, cu_seqlens=(0, 3)), "length of the sequences, 4; .* with 3"),
        (lambda: ShardedSequences(4, cu_seqlens=(0, 3, 2, 4)), "documents must ascend"),
        (lambda: ShardedSequences(4, cu_seqlens=torch.zeros(1, 2)), "must be integers .*list"),
        (lambda: _told_twice(None), r"cu_seq_lens_k are \(0, 6, 17\), .* documents \(0, 17\)"),
        (lambda: _told_twice((0, 5, 17)), r"are \(0, 6, 17\), .* documents \(0, 5, 17\)"),
        (lambda: ShardedSequences(4).shard({}), "needs input_ids"),
        (lambda: ShardedSequences(4).shard(_batch()), r"of 4 positions, .* are \[2, 17\]"),
        (lambda: ShardedSequences(4).unshard(torch.ones(1, 3)), "ranks 4.* has 3, of 4"),
    ],
)
def test_what_does_not_fit_is_refused(call, match):
    with pytest.raises(InvalidArgumentError, match=match):
        call()

"""Sequences of any length through ShardedSequences: one process's loss, gradients and answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as c10d

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import LAYOUTS, ShardedSequences

VOCAB, LENGTH = 13, 17
PACKED = (0, 1, 7, 7, 12, 17)


def _batch():
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=random)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.2, -100)
    return {"input_ids": ids, "labels": labels}


def _joined(name, batch, documents):
    """Return one entry of the shards, joined again, and this rank's padding of it."""
    sequences = ShardedSequences(LENGTH, cu_seqlens=documents, group=c10d.group.WORLD)
    own = sequences.shard(batch)[name]
    padding = own[:, sequences.positions() >= LENGTH]
    assert padding.shape[1] == (3, 0)[c10d.get_rank()]
    return sequences.unshard(own), padding


def _labels_and_positions():
    batch = _batch()
    kept = batch["labels"].clone()
    for documents in (None, PACKED):
        targets, places = torch.full_like(kept, -100), torch.zeros_like(kept)
        for start, stop in pairwise(documents or (0, LENGTH)):
            targets[:, start : stop - 1] = kept[:, start + 1 : stop]
            places[:, start:stop] = torch.arange(stop - start)
        labels, padding = _joined("labels", batch, documents)
        assert torch.equal(labels, targets), "shifted within documents before they are cut"
        assert (padding == -100).all()
        ids, padding = _joined("position_ids", batch, documents)
        assert torch.equal(ids, places)
        assert not padding.any()
    assert torch.equal(batch["labels"], kept)
    given = torch.arange(LENGTH).flip(0)[None]
    ids, _ = _joined("position_ids", {**batch, "position_ids": given}, None)
    assert torch.equal(ids, given)


def test_labels_are_shifted_and_positions_count_within_documents_before_they_are_cut():
    run_ranks(_labels_and_positions, 2)


def test_labels_that_are_shifted_already_are_cut_as_they_are():
    batch = _batch()
    mine = ShardedSequences(LENGTH, cu_seqlens=PACKED).shard(batch, shifted=True)
    assert torch.equal(mine["labels"], batch["labels"])


def _round_trips():
    for layout in LAYOUTS:
        sequences = ShardedSequences(LENGTH, layout=layout, group=c10d.group.WORLD)
        batch = {
            "input_ids": _batch()["input_ids"],
            "weights": torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(4)),
            "seen": torch.ones(2, LENGTH, dtype=torch.bool),
            "labels": None,
            "name": "text",
        }
        mine = sequences.shard(batch)
        assert mine["labels"] is None
        assert mine["name"] == "text"
        for name in ("input_ids", "weights", "seen"):
            assert mine[name].shape == (2, sequences.layout.local_length)
            assert mine[name].dtype == batch[name].dtype
            assert torch.equal(sequences.unshard(mine[name]), batch[name])
        heads = mine["weights"][:, None, :, None].expand(-1, 3, -1, 5)
        assert torch.equal(sequences.unshard(heads, 2)[:, 0, :, 0], batch["weights"])
        held = LAYOUTS[layout](LENGTH, c10d.get_world_size()).positions(c10d.get_rank())
        assert torch.equal(sequences.positions(), held)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_join_to_the_whole_bit_for_bit(size):
    run_ranks(_round_trips, size)


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
        (lambda: ShardedSequences(0), "rank 0: .* at least 1; it is 0"),
        (lambda: ShardedSequences(4, layout="ring"), "contiguous, zigzag, stripe; it is 'ring'"),
        (lambda: ShardedSequences(4, cu_seqlens=(0, 3)), "length of the sequences, 4; .* with 3"),
        (lambda: ShardedSequences(4, cu_seqlens=(0, 3, 2, 4)), "documents must ascend"),
        (lambda: ShardedSequences(4, cu_seqlens=torch.zeros(1, 2)), r"1-d tensor of integers; .*2"),
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

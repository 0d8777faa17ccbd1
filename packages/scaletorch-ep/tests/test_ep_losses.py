"""Balance of experts on several ranks and micro-batches, beside one process on the whole batch."""

import math

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.expert_parallel import (
    count_tokens,
    global_balance_loss,
    sequence_balance_loss,
)
from scaletorch.parallel.expert_parallel.building import move_bias, statistics_of

ROWS, LENGTH, EXPERTS, TOP_K = 4, 8, 6, 2
WORLD = c10d.group.WORLD


def _logits():
    drawn = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, LENGTH, EXPERTS, generator=drawn, dtype=torch.float64)


def _documents():
    """Return the document of each token: two in a row, over two rows, and padding behind."""
    ids = torch.arange(ROWS)[:, None] * 2 + (torch.arange(LENGTH) >= 3)
    return ids.masked_fill(torch.arange(LENGTH) >= torch.tensor([8, 6, 4, 8])[:, None], -1)


# name -> loss by the formula, one token after another, of whole logits
def _by_sequence(logits, documents):
    total, sequences = 0.0, documents[documents >= 0].unique()
    for document in sequences:
        scores = logits[documents == document].sigmoid()
        chosen = F.one_hot(scores.topk(TOP_K).indices, EXPERTS).sum(1).double()
        often = chosen.sum(0) * EXPERTS / (TOP_K * len(scores))
        total = total + (often * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    return total / len(sequences)


def _globally(logits, documents):
    scores = logits[documents >= 0].softmax(1)
    chosen = F.one_hot(scores.topk(TOP_K).indices, EXPERTS).sum(1).double()
    return EXPERTS * (chosen.mean(0) / TOP_K * scores.mean(0)).sum()


LOSSES = {"sequence": _by_sequence, "global": _globally}


def _part(loss, logits, documents, cp, counts):
    """Return this rank's part of a loss of one micro-batch."""
    if loss == "sequence":
        scores, sequences = logits.sigmoid(), len(_documents()[_documents() >= 0].unique())
        index = scores.topk(TOP_K).indices
        return sequence_balance_loss(scores, index, sequences, sequence_of=documents, group=cp)
    scores = logits.softmax(-1)
    index, valid = scores.topk(TOP_K).indices, documents >= 0
    return global_balance_loss(scores, index, counts=counts, valid=valid, group=WORLD)


def _layout(loss, micro_batches):
    """Return the loss and the gradient of the logits here: rows over dp, positions over cp."""
    rank, size = c10d.get_rank(), c10d.get_world_size()
    groups = [c10d.new_group([0, 1]), c10d.new_group([2, 3])] if size == 4 else [WORLD]
    cp = groups[rank // 2 if size == 4 else 0]
    row = slice(rank // 2 * 2, rank // 2 * 2 + 2) if size == 4 else slice(0, ROWS)
    position = slice(rank % 2 * 4, rank % 2 * 4 + 4)
    logits = _logits()[row, position].clone().requires_grad_()
    documents = _documents()[row, position]
    counts = None
    if micro_batches > 1:
        valid = documents >= 0
        counts = count_tokens(logits.topk(TOP_K).indices, EXPERTS, valid=valid)
        c10d.all_reduce(counts)
    total = 0.0
    parts = zip(logits.chunk(micro_batches), documents.chunk(micro_batches), strict=True)
    for part, ids in parts:
        found = _part(loss, part, ids, cp, counts)
        found.backward()
        total = total + found.detach()
    c10d.all_reduce(total)
    for group in groups[: 2 * (size == 4)]:
        if group is cp:
            c10d.destroy_process_group(group)
    return total, logits.grad, row, position


def _all_layouts():
    return {(loss, number): _layout(loss, number) for loss in LOSSES for number in (1, 2)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_ranks_and_micro_batches_add_up_to_one_process(ranks):
    for found in run_ranks(_all_layouts, ranks):
        for case, (total, gradient, row, position) in found.items():
            logits = _logits().requires_grad_()
            expected = LOSSES[case[0]](logits, _documents())
            expected.backward()
            assert relative_error(total, expected.detach()) <= 1e-12, case
            assert relative_error(gradient, logits.grad[row, position]) <= 1e-12, case


def test_rows_are_sequences_and_one_process_needs_no_group():
    scores = _logits().sigmoid()
    index = scores.topk(TOP_K).indices
    rows = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH)
    expected = _by_sequence(_logits(), rows)
    assert relative_error(sequence_balance_loss(scores, index, ROWS), expected) <= 1e-12
    balanced = torch.full((1, 3, 3), 0.5)
    even = torch.tensor([[[0], [1], [2]]])
    assert sequence_balance_loss(balanced, even, 1).item() == pytest.approx(1)
    assert global_balance_loss(balanced / 1.5, even).item() == pytest.approx(1)
    assert sequence_balance_loss(balanced.bfloat16(), even, 1).dtype == torch.float32
    padded = sequence_balance_loss(scores, index, ROWS, sequence_of=rows.masked_fill(rows >= 0, -1))
    assert padded.item() == 0


def test_bias_and_statistics():
    bias, counts = torch.zeros(3), torch.tensor([4, 2, 2])
    move_bias(bias, counts, 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5]
    move_bias(bias, torch.tensor([2, 2, 2]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5]
    told = statistics_of(counts)
    assert (told.tokens, told.fullest, told.unused) == ((4, 2, 2), 1.5, 0)
    assert told.entropy == pytest.approx(1.5 * math.log(2))
    assert statistics_of(torch.tensor([0, 0])).unused == 2


def test_what_does_not_fit():
    ones = torch.ones(2, 3, 4)
    with pytest.raises(InvalidArgumentError, match="of the same tokens"):
        global_balance_loss(ones, torch.ones(3, 2, 1).long())
    with pytest.raises(InvalidArgumentError, match="pass sequence_of, the number"):
        sequence_balance_loss(ones[0], torch.ones(3, 2).long(), 1)
    valid = torch.tensor([True, False])
    assert count_tokens(torch.tensor([[0, 2], [1, 1]]), 3, valid=valid).tolist() == [1, 0, 1]

"""Lists of tensors that lie in one memory are sent without being copied together first."""

import torch

import scaletorch.dist as dist
from scaletorch.dist.testing import distributed_test
from scaletorch.dist.wire.sums import as_one


def test_as_one():
    whole = torch.arange(10.0)
    pieces = list(whole[1:9].split([3, 0, 5]))
    joined = as_one(pieces)
    assert joined.data_ptr() == whole[1:].data_ptr()
    assert joined.tolist() == whole[1:9].tolist()
    assert as_one([part.view(torch.uint8) for part in pieces]).numel() == 32
    for parts in (
        pieces[::-1],  # in another order
        [whole[:3], whole[4:6]],  # with a hole
        [whole[:3], whole[2:5]],  # with an overlap
        [torch.ones(2), torch.zeros(2)],  # of two memories, wherever they lie
        [whole[:0], torch.ones(2)],
        [whole[:0], whole[:0]],
    ):
        assert as_one(parts).tolist() == torch.cat(parts).tolist()


@distributed_test(world_size=3)
def test_chunks_of_one_tensor():
    rank = dist.get_rank()
    whole = torch.arange(12.0, requires_grad=True) * (rank + 1)
    before = whole.detach().clone()
    entries = list(whole.chunk(3))
    output = entries[rank].detach().clone()
    dist.reduce_scatter(output, entries)
    assert output.tolist() == [6.0 * x for x in range(4 * rank, 4 * rank + 4)]
    received = list(torch.zeros(12).chunk(3))
    dist.all_to_all(entries, received)
    expected = [[x * (other + 1.0) for x in range(4 * rank, 4 * rank + 4)] for other in range(3)]
    assert [part.tolist() for part in received] == expected
    assert torch.equal(whole, before)
    mixed = [torch.tensor([rank], dtype=torch.uint8), torch.ones(3), torch.ones(1).double()]
    shapes = [mixed[rank].clone().zero_() for _ in range(3)]
    dist.all_to_all(mixed, shapes)  # parts that begin where their dtype may not
    assert [part.dtype for part in shapes] == [mixed[rank].dtype] * 3

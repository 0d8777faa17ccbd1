"""A peer sends and receives what `isend` and `irecv` do."""

import pytest
import torch

from scaletorch.dist import InvalidArgumentError, NotInGroupError, get_rank
from scaletorch.dist.collectives.messages import Peer
from scaletorch.dist.testing import distributed_test
from scaletorch.dist.wire.checks import VARIABLE

DATA = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor([True, False, True]),
    torch.arange(4, dtype=torch.int16),
    torch.tensor(3, dtype=torch.int64),
    torch.empty(0),
]


@distributed_test(world_size=2)
@pytest.mark.parametrize("checked", ["0", "1"])
def test_both_ways_at_once(checked, monkeypatch):
    monkeypatch.setenv(VARIABLE, checked)
    peer = Peer(1 - get_rank(), None, torch.device("cpu"))
    for data in DATA:
        arrived = torch.empty_like(data)
        sent, received = peer.send(data), peer.receive(arrived)
        received.wait()
        sent.wait()
        assert torch.equal(arrived, data)


@distributed_test(world_size=3)
def test_peers_are_other_members():
    pair = torch.distributed.new_group([0, 1])
    with pytest.raises(InvalidArgumentError, match="is this rank itself, not a peer"):
        Peer(get_rank(), None, torch.device("cpu"))
    if get_rank() < 2:
        with pytest.raises(NotInGroupError, match="rank=2 is not in the group"):
            Peer(2, pair, torch.device("cpu"))

"""Arguments of a wrong kind get an error of ours, on every rank, before anything is sent."""

from __future__ import annotations

import pytest
import torch

from scaletorch import dist
from scaletorch.dist import devices
from scaletorch.dist import functional as F
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks

X = torch.ones(4)
CALLS = {
    "check_collectives": (lambda: dist.check_collectives("no"), "True, False or None, got 'no'"),
    "bucket as text": (lambda: dist.all_reduce_params([X], bucket_size_mb="1"), "must be positive"),
    "bucket": (
        lambda: dist.all_reduce_params([X], bucket_size_mb=float("inf")),
        "must be positive",
    ),
    "dim": (lambda: F.all_gather(X, "a"), "dim a does not exist in a tensor of shape"),
    "backend": (lambda: devices.resolve_backend(None), "named by a text such as 'nccl', got None"),
    "local rank": (lambda: devices.set_device("0"), "local_rank must be a number of at least 0"),
    "negative rank": (lambda: devices.set_device(-1), "local_rank must be a number of at least 0"),
}
OF_TWO = {
    "tag of send": lambda peer: dist.send(X, peer, tag="a"),
    "tag of recv": lambda peer: dist.recv(X, peer, tag=-1),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_one_process(name):
    call, text = CALLS[name]
    with pytest.raises(InvalidArgumentError, match=text):
        call()


def check_tags():
    for call in OF_TWO.values():
        with pytest.raises(InvalidArgumentError, match="tag must be a number of at least 0, got"):
            call(1 - dist.get_rank())


def test_tags():
    run_ranks(check_tags, 2)

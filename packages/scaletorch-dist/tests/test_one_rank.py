"""A group of one rank: every collective gives what N ranks would, and nothing is sent."""

import pytest
import torch
import torch.distributed as c10d
from torch.utils._python_dispatch import TorchDispatchMode

import scaletorch.dist as dist
from scaletorch.dist import functional as F
from scaletorch.dist.collectives import flat
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.dist.wire import backend as raw


class Sent(TorchDispatchMode):
    """Names of the backend's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def gathered(x, group):
    return torch.cat(dist.all_gather(x, group))


def in_place(call):
    def run(x, group):
        x = x.clone()
        call(x, group)
        return x

    return run


CALLS = {
    "all_reduce": in_place(lambda x, group: dist.all_reduce(x, group=group)),
    "all_gather": gathered,
    "broadcast": in_place(lambda x, group: dist.broadcast(x, 0, group)),
    "reduce": in_place(lambda x, group: dist.reduce(x, 0, group=group)),
    "scatter": in_place(lambda x, group: dist.scatter(x, [x + 0], 0, group)),
    "gather": lambda x, group: torch.cat(dist.gather(x, 0, group)),
    "all_reduce_dict": in_place(lambda x, group: dist.all_reduce_dict({"x": x}, group=group)),
    "all_reduce_params": in_place(lambda x, group: dist.all_reduce_params([x], group=group)),
    "all_gather_flat": in_place(lambda x, group: flat.all_gather_flat(x.view(-1), [6], group)),
    "reduce_scatter_flat": lambda x, group: (
        flat.reduce_scatter_flat(x.view(-1), [6], group=group).wait().view(2, 3)
    ),
    "copy": F.copy,
    "sum": F.all_reduce,
    "join": lambda x, group: F.all_gather(x, 0, group),
    "part": lambda x, group: F.reduce_scatter(x, 0, group),
    "join shares": lambda x, group: F.gather(x, 0, group),
    "split": lambda x, group: F.split(x, 0, group),
    "all_to_all": lambda x, group: F.all_to_all(x, 0, 1, group),
}


@distributed_test(world_size=1)
def test_nothing_is_sent():
    x = torch.arange(6.0).view(2, 3)
    for name, call in CALLS.items():
        with Sent() as sent:
            found = call(x.clone(), c10d.group.WORLD)
        assert torch.equal(found, x), name
        assert sent.names == [], name
    with Sent() as sent:
        c10d.all_reduce(x)
    assert sent.names == ["c10d.allreduce_.default"]


@distributed_test(world_size=1)
def test_gloo_gets_copies_of_what_is_on_an_accelerator():
    assert raw._find_route("cpu", c10d.group.WORLD).native
    assert not raw._find_route("cuda", c10d.group.WORLD).native


def forgotten():
    with pytest.warns(RuntimeWarning, match="was launched as one of 2, but"):
        dist.all_reduce(torch.ones(1))


def test_one_of_several_that_never_met_is_told():
    run_ranks(forgotten, 2, init=False)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_flat_sums_without_a_group_are_the_data(op):
    data = torch.arange(3.0)
    assert torch.equal(flat.reduce_scatter_flat(data.clone(), [3], op).wait(), data)

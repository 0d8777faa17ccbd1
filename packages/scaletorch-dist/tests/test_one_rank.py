"""One process, or a group of one: each call gives what N ranks would, and sends nothing."""

import torch
import torch.distributed as c10d
from torch.utils._python_dispatch import TorchDispatchMode

import scaletorch.dist as dist
from scaletorch.dist.collectives import flat
from scaletorch.dist.testing import distributed_test


class Sent(TorchDispatchMode):
    """Names of the backend's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def in_place(call):
    def run(x, group):
        call(x := x.clone(), group)
        return x

    return run


def filled(call):
    def run(x, group):
        call(target := torch.zeros_like(x), x, group)
        return target

    return run


CALLS = {
    "all_reduce": in_place(lambda x, group: dist.all_reduce(x, "mean", group)),
    "reduce": in_place(lambda x, group: dist.reduce(x, 0, group=group)),
    "broadcast": in_place(lambda x, group: dist.broadcast(x, 0, group)),
    "all_reduce_dict": in_place(lambda x, group: dist.all_reduce_dict({"x": x}, group=group)),
    "all_reduce_params": in_place(lambda x, group: dist.all_reduce_params(iter([x]), group=group)),
    "all_gather_flat": in_place(lambda x, group: flat.all_gather_flat(x.view(-1), [6], group)),
    "all_gather": lambda x, group: dist.all_gather(x, group)[0],
    "gather": lambda x, group: dist.gather(x, 0, group)[0],
    "all_to_all": dist.all_to_all,
    "fill a list": filled(lambda target, x, group: dist.all_gather([target], x, group)),
    "scatter": filled(lambda target, x, group: dist.scatter(target, [x], 0, group)),
    "reduce_scatter": filled(lambda to, x, group: dist.reduce_scatter(to, [x], "mean", group)),
    "exchange lists": filled(lambda target, x, group: dist.all_to_all([x], [target], group)),
    "reduce_scatter_flat": lambda x, group: (
        flat.reduce_scatter_flat(x.view(-1).clone(), [6], "mean", group).wait().view(2, 3)
    ),
}


def return_what_many_would(group=None):
    x = torch.arange(6.0).view(2, 3)
    for name, call in CALLS.items():
        with Sent() as sent:
            found = call(x, group)
        assert torch.equal(found, x), name
        assert found.data_ptr() != x.data_ptr(), name
        assert sent.names == [], name


def test_one_process_returns_what_many_would():
    return_what_many_would()


@distributed_test(world_size=1)
def test_a_group_of_one_rank_sends_nothing():
    return_what_many_would(c10d.group.WORLD)
    with Sent() as sent:
        c10d.all_reduce(torch.ones(1))
    assert sent.names == ["c10d.allreduce_.default"]

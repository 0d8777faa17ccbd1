"""What a call reads and writes lives, and keeps its values, until the call is waited for."""

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from group_calls import standing_before
from sweeps import today
from test_host_waits import LAYOUTS, small_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from training import grid, sizes_of

import scaletorch.dist as dist
from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import devices
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import shard_optimizer

pytestmark = pytest.mark.timeout(500)  # the first test may build the stand-in


class Kept:
    """The handle of a call that a backend makes on copies, so that it keeps nothing alive.

    Results are written at `wait()`, and not before.
    """

    def __init__(self, name, call, args, options, faults):
        self.name, self.faults, self.tensors = name, faults, []
        args, options = tree_map_only(Tensor, self._copy, (args, options))
        self.work = call(*args, **options)

    def _copy(self, tensor):
        place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        copy = tensor.clone()
        self.tensors.append((StorageWeakRef(tensor.untyped_storage()), place, copy, _bits(copy)))
        return copy

    def wait(self, *args):
        done = self.work.wait(*args)
        written = []
        for reference, place, copy, before in self.tensors:
            held = _at(reference, place, copy.device)
            if held is None:
                self.faults.append(f"a tensor of {self.name} was freed before wait()")
            elif not torch.equal(_bits(held), before):
                self.faults.append(f"a tensor of {self.name} was changed before wait()")
            elif not torch.equal(_bits(copy), before):
                written.append((held, copy))
        for held, copy in written:
            held.copy_(copy)
        self.tensors.clear()
        return done

    def is_completed(self):
        return self.work.is_completed()

    def __del__(self):
        if self.tensors:
            self.faults.append(f"{self.name} was dropped before wait()")


def _bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _at(reference, place, device):
    """Return a tensor in memory that is only known, or None if it was freed."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return None
    dtype, offset, shape, strides = place
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, strides)


@contextmanager
def backend_that_keeps_nothing():
    """Let every call run on copies of its tensors; yield the list of faults.

    Finding no call at all is an error: then there was nothing to look at.
    """
    faults, seen = [], []

    def wrap(name, call):
        def run(group, *args, **options):
            seen.append(name)
            return Kept(name, partial(call, group), args, options, faults)

        return run

    with standing_before(wrap):
        yield faults
    gc.collect()
    assert seen, "no call was seen"


def kept_on(layout, options):
    """Return the faults of two steps, and whether they gave the same as without the stand-in."""
    dp, pp, *_ = layout
    ep, options = options.get("ep", 1), {k: v for k, v in options.items() if k != "ep"}
    with grid(sizes_of(layout) | {"ep_size": ep}) as manager:
        device = devices.current_device()
        ids = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0)).to(device)
        batch = {"input_ids": ids, "labels": ids}

        def train():
            torch.manual_seed(0)
            model = small_model(ep > 1, tie_embeddings=pp > 1).to(device)
            model = parallelize(model, manager, rehearse=False, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if dp > 1:
                optimizer = shard_optimizer(optimizer, model, stage=2, overlap=True)
            for _ in range(2):
                optimizer.zero_grad()
                train_step(model, shard_global_batch(batch, 2, model=model))
                optimizer.step()
            model.wait_for_parameters()
            return [parameter.detach().cpu() for parameter in model.parameters()]

        plain = train()
        with backend_that_keeps_nothing() as faults:
            same = all(torch.equal(*pair) for pair in zip(plain, train(), strict=True))
        return faults, same


def kept_on_all(cases, backend):
    dist.init_dist("pytorch", backend=backend, timeout=60)
    return [kept_on(*case) for case in cases]


ON_DEVICES = [
    *((layout, {}) for layout in LAYOUTS),
    *(((1, 1, 4, 1), {"cp_method": method}) for method in ("all_gather", "hybrid")),
    ((1, 2, 1, 2), {"schedule": "zb_v"}),
    ((2, 1, 1, 2), {"ep": 2}),
    ((2, 2, 1, 1), {"ep": 2}),
]
ON_CPU = [
    *((layout, {}) for layout in LAYOUTS if layout[1] > 1),  # messages of pipelines go one by one
    ((1, 2, 1, 2), {"schedule": "zb_v"}),
]


def require_kept(cases, backend):
    answers = run_ranks(kept_on_all, 4, cases, backend, init=False, timeout=450)
    for rank, found in enumerate(answers):
        for case, (faults, same) in zip(cases, found, strict=True):
            assert not faults, f"{case}, rank {rank}: {sorted(set(faults))}"
            assert same, f"{case}, rank {rank}: a result was read before wait()"


def test_buffers_live_until_their_calls_are_waited_for(plugins, monkeypatch):
    monkeypatch.syspath_prepend(plugins)
    require_kept(today(ON_DEVICES, len(ON_DEVICES)), "hccl")


def test_buffers_of_single_messages_live_as_long():
    require_kept(today(ON_CPU, len(ON_CPU)), "gloo")


def careless():
    """Free, change and forget what calls are working on, and read a result too early."""
    with backend_that_keeps_nothing() as faults:
        c10d.all_reduce(torch.ones(2), async_op=True).wait()
        data = torch.ones(2)
        work = c10d.all_reduce(data, async_op=True)
        early = data.clone()
        work.wait()
        assert (early.tolist(), data.tolist()) == ([1, 1], [2, 2])
        work = c10d.all_reduce(data, async_op=True)
        data.add_(1)
        work.wait()
        c10d.barrier()
        dropped = c10d.all_reduce(data, async_op=True)
        dropped.work.wait()
        del dropped
    return faults


def test_careless_calls_are_seen():
    whats = ("freed before wait()", "changed before wait()", "dropped before wait()")
    for found in run_ranks(careless, 2):
        assert len(found) == 3
        assert all(what in line for what, line in zip(whats, found, strict=True))

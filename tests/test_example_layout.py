"""What examples/layout predicts of a layout is what its ranks then hold and send."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.pg_manager import (
    Grid,
    destroy_process_group_manager,
    setup_process_group_manager,
)

# Ranks have it from here, and are used again only if they change nothing.
sys.path.extend(
    {str(Path(__file__).resolve().parent.parent / "examples" / "layout")}.difference(sys.path)
)

from job import Job, divide
from memory import memory
from traffic import sent

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4)
FEW = 64  # bytes: numbers of tokens, losses and what stages agree on are left out
LAYOUTS = [
    {"tp": 2, "dp": 2},
    {"pp": 2, "cp": 2},
    {"tp": 2, "cp": 2},
]


class Counting(TorchDispatchMode):
    """Adds up what leaves this rank, as a ring would send it; every message passes here."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent += self._bytes(func._schema.name.removeprefix("c10d::"), args, result)
        return result

    def _bytes(self, name, args, result):
        whole = max(nbytes(value) for value in (*args, result))
        if name.startswith(("recv", "barrier")) or whole <= FEW:
            return 0
        if name == "send":
            return nbytes(args[0])
        size = next(filter(None, map(group_size, tree_leaves(args))))
        return (2 if name.startswith("allreduce") else 1) * whole * (size - 1) // size


def nbytes(value):
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))


def group_size(value):
    try:
        return dist.ProcessGroup.unbox(value).size()
    except (RuntimeError, TypeError):  # another argument
        return None


class Kept(saved_tensors_hooks):
    """The most bytes that autograd kept at a time, beside parameters; each memory counts once."""

    def __init__(self, model):
        super().__init__(self.pack, lambda held: held.tensor)
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.users, self.now, self.most = Counter(), 0, 0

    def pack(self, tensor):
        return Held(tensor, self)

    def change(self, tensor, users):
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in self.parameters:
            before, self.users[at] = self.users[at], self.users[at] + users
            self.now += storage.nbytes() * ((self.users[at] > 0) - (before > 0))
            self.most = max(self.most, self.now)


class Held:
    def __init__(self, tensor, kept):
        self.tensor, self.kept = tensor, kept
        kept.change(tensor, 1)

    def __del__(self):
        self.kept.change(self.tensor, -1)


def step(model, optimizer, manager, job, number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(64, (job.rows, job.length + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    micro_batches = job.rows // manager.dp_size // job.micro_rows
    optimizer.zero_grad()
    train_step(model, shard_global_batch(batch, micro_batches, manager), manager)


def storage(tensors):
    """Return the bytes of the memory under some tensors."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def measured(job, sizes):
    """Return bytes of parameters, gradients and state, of what autograd kept, and those sent."""
    manager = setup_process_group_manager(**{f"{axis}_size": n for axis, n in sizes.items()})
    torch.manual_seed(0)
    model = parallelize(Llama(job.config), manager, schedule=job.schedule)
    optimizer = torch.optim.AdamW(model.parameters())
    if job.zero:
        shard_optimizer(optimizer, model, stage=job.zero)
    step(model, optimizer, manager, job, 0)  # learns the order of buckets, the forms of messages
    optimizer.step()
    kept = Kept(model)
    with kept, Counting() as counting:
        step(model, optimizer, manager, job, 1)
    optimizer.step()
    updated = [shard.tensor for shard in parameter_shards(model)]
    states = [x for state in optimizer.state.values() for x in state.values()]
    held = (model.parameters(), [x.grad for x in updated], states)
    found = [storage(each) for each in held]
    destroy_process_group_manager()
    return [*found, kept.most, counting.sent]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    preload("scaletorch.compose", "scaletorch.models")  # by all ranks at once


@pytest.fixture
def _messages(monkeypatch):
    """Ranks of one machine would not send gradients but read each other's memory."""
    monkeypatch.setenv("SCALETORCH_SHARED_MEMORY", "0")


@pytest.mark.usefixtures("_messages")
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_memory_and_traffic_are_those_of_the_ranks(sizes):
    config = replace(CONFIG, tie_embeddings="pp" in sizes)
    job = Job(config, length=32, rows=8, micro_rows=2)
    grid = Grid(**sizes)
    division = divide(job, grid)
    for rank, found in enumerate(run_ranks(measured, grid.world_size, job, sizes)):
        place = grid.coordinates(rank)
        expected = memory(division, place.pp, place.tp)
        assert found[:3] == [expected.parameters, expected.gradients, expected.state]
        assert found[3] == pytest.approx(expected.activations, rel=0.05)
        assert found[4] == sum(each.bytes for each in sent(division, place.pp).values())


def test_with_zero_1_ranks_hold_their_share_of_sums_and_state():
    job = Job(CONFIG, length=32, rows=8, micro_rows=2, zero=1)
    expected = memory(divide(job, Grid(dp=4)), 0)
    for found in run_ranks(measured, 4, job, {"dp": 4}):
        assert found[0] == expected.parameters
        share = expected.gradients - expected.parameters
        assert found[1:3] == pytest.approx([share, expected.state], rel=0.01)

"""Sharded optimizers train as the same optimizer does in one process, whatever the optimizer."""

from __future__ import annotations

import contextlib
import copy
import io
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as c10d
from in_turn import for_each, in_turn
from torch import nn

from scaletorch.dist import RankFailedError, Work, all_gather_object
from scaletorch.dist.errors import InvalidArgumentError, MismatchError, StateError
from scaletorch.dist.testing import relative_error, run_ranks, worst
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    parameter_shards,
    shard_optimizer,
    whole_gradients,
)
from scaletorch.parallel.data_parallel.sharding import shards as sharded
from scaletorch.parallel.data_parallel.sharding.gather import ParameterGather

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {"lr": 0.02},
}


class Net(nn.Module):
    """Layers in a list, a weight read past its module, one that is tied and one never used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])
        self.raw = nn.Linear(6, 6, bias=False)
        self.unused = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, skip=False):
        x = self.embed(ids)
        for layer in self.layers[skip:]:
            x = x + torch.tanh(layer(x))
        return self.head(nn.functional.linear(x, self.raw.weight))


def batch(step, micro, rank, ranks):
    """Return ids and labels: another number of valid ones on each rank, none on the last."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(7, (3, 4), generator=generator)
    labels = torch.randint(7, (3, 4), generator=generator)
    labels[rank % 3 :] = -100
    if rank == ranks - 1 and step == 1:
        labels[:] = -100
    return ids, labels


def loss(model, ids, labels, skip):
    out = model(ids, skip).flatten(0, 1)
    return nn.functional.cross_entropy(out, labels.flatten(), reduction="sum") / 10


def train(model, optimizer, ranks, own, micros=2, steps=4):
    """Train; ``own`` is this rank, or None for one process that does all ranks' work."""
    for step in range(steps):
        for micro in range(micros):
            last = micro == micros - 1
            quiet = own is not None and not last
            with model.no_sync() if quiet else contextlib.nullcontext():
                for rank in range(ranks) if own is None else [own]:
                    loss(model, *batch(step, micro, rank, ranks), skip=rank == 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(name, dtype=torch.float64, seed=3):
    torch.manual_seed(seed)
    net = Net().to(dtype)
    kind, settings = getattr(torch.optim, name), OPTIMIZERS[name]
    return net, lambda model: kind(
        [
            {"params": list(model.layers.parameters()), **settings},
            {"params": [model.embed.weight, model.raw.weight, model.unused.weight], "lr": 0.003},
        ]
    )


def check_optimizer(name, stage, overlap, bucket_size=50):
    ranks, rank = c10d.get_world_size(), c10d.get_rank()
    plain, make = build(name)
    model = DataParallelBucket(
        copy.deepcopy(plain), bucket_size=bucket_size, group=c10d.group.WORLD
    )
    optimizer = shard_optimizer(make(model), model, stage=stage, overlap=overlap)
    reference = make(plain)
    train(model, optimizer, ranks, rank)
    train(plain, reference, ranks, None)
    found = model.state_dict()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(found[key], expected, rtol=1e-11, atol=1e-12, msg=key)
    state = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.ndim)
    whole = sum(t.numel() for s in reference.state.values() for t in s.values() if t.ndim)
    assert sum(all_gather_object(state)) == whole
    if name == "AdamW":
        assert max(all_gather_object(state)) <= whole / ranks + 2 * 8  # shares are even


def test_every_optimizer_trains_as_one_process():
    run_ranks(in_turn, 2, for_each(check_optimizer, product(OPTIMIZERS, [1], [False])), timeout=200)


WAYS = {  # ranks -> optimizer, stage, overlap
    1: [("AdamW", 2, True)],
    3: [("Muon", 1, True), ("Muon", 2, False)],
    4: [("AdamW", 1, True), ("AdamW", 2, False), ("AdamW", 2, True)],
}


@pytest.mark.parametrize("ranks", WAYS)
def test_stages_and_overlap(ranks):
    run_ranks(in_turn, ranks, for_each(check_optimizer, WAYS[ranks]), timeout=200)


def check_late_arrival(waits):
    """Parameters arrive only when somebody waits for them: forward does, wherever it reads them."""
    gather = sharded.ShardedBucket.gather
    before_forward = ParameterGather.before_forward

    def late(bucket):
        old = bucket.values.clone()
        gather(bucket).wait()
        new = bucket.values.clone()
        bucket.values[: bucket.own.start] = old[: bucket.own.start]
        bucket.values[bucket.own.stop :] = old[bucket.own.stop :]
        return Work((), lambda: bucket.values.copy_(new))

    def never(gathers, name):
        gathers._seen.add(name)

    with (
        mock.patch.object(sharded.ShardedBucket, "gather", late),
        mock.patch.object(ParameterGather, "before_forward", before_forward if waits else never),
    ):
        check_optimizer("AdamW", 1, True, bucket_size=20)


def test_forward_waits_for_what_it_reads():
    run_ranks(check_late_arrival, 2, True)
    with pytest.raises(RankFailedError, match="AssertionError: "):
        run_ranks(check_late_arrival, 2, False)


def check_masters(grad_type):
    """Return how far masters are from one process's, relative to how far these have moved."""
    ranks, rank = c10d.get_world_size(), c10d.get_rank()
    net, make = build("AdamW", torch.bfloat16)
    model = DataParallelBucket(net, grad_type, bucket_size=50, group=c10d.group.WORLD)
    reference = with_masters(copy.deepcopy(net), make, ranks)
    optimizer = shard_optimizer(make(model), model)
    assert all(s.tensor.dtype == torch.float32 and s.is_master for s in parameter_shards(model))
    train(model, optimizer, ranks, rank)
    errors = []
    for shard in parameter_shards(model):
        before, after = (t.view(-1)[shard.start : shard.stop] for t in reference[shard.name])
        errors.append(((shard.tensor.detach().view(-1) - after).norm(), (after - before).norm()))
        mine = shard.parameter.detach().view(-1)[shard.start : shard.stop]
        assert torch.equal(mine, shard.tensor.detach().to(torch.bfloat16))
    # What somebody loads into the parameters reaches the masters.
    model.load_state_dict({name: torch.full_like(v, 0.5) for name, v in model.state_dict().items()})
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    assert all((value == 0.5).all() for value in model.state_dict().values())
    lost, moved = (torch.stack(each).norm() for each in zip(*errors, strict=True))
    return (lost / moved).item()


def with_masters(net, make, ranks, micros=2, steps=4):
    """Train bfloat16 parameters with float32 masters and sums; return first and last masters."""
    masters = copy.deepcopy(net).float()
    first = {name: p.detach().clone() for name, p in masters.named_parameters()}
    optimizer = make(masters)
    for step in range(steps):
        for micro, rank in product(range(micros), range(ranks)):
            net.zero_grad()
            loss(net, *batch(step, micro, rank, ranks), skip=rank == 1).backward()
            for own, master in zip(net.parameters(), masters.parameters(), strict=True):
                if own.grad is not None:
                    master.grad = own.grad.float() + (0 if master.grad is None else master.grad)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, master in zip(net.parameters(), masters.parameters(), strict=True):
                own.copy_(master)
    return {name: (first[name], p.detach()) for name, p in masters.named_parameters()}


@pytest.mark.parametrize("grad_type", [None, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_of_16_bit_parameters(grad_type, ranks):
    """Sums in float32 reach the masters unrounded; in bfloat16 each is off by 2e-3 of itself."""
    error = worst(run_ranks(check_masters, ranks, grad_type))
    assert error <= (1e-6 if grad_type else 2e-3)
    assert grad_type or ranks == 1 or error > 1e-5  # the comparison tells the two apart


def check_refusals():
    net, make = build("AdamW")
    model = DataParallelBucket(net, group=c10d.group.WORLD)
    with pytest.raises(InvalidArgumentError, match=r"stage must be 1 .* got 3"):
        shard_optimizer(make(model), model, stage=3)
    with pytest.raises(InvalidArgumentError, match="LBFGS cannot be sharded"):
        shard_optimizer(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(InvalidArgumentError, match="must be a DataParallelBucket, got Net"):
        shard_optimizer(make(model), net)
    kind = torch.optim.SGD if c10d.get_rank() else torch.optim.Adam
    with pytest.raises(MismatchError, match="the optimizer to shard"):
        shard_optimizer(kind(model.parameters()), model)
    with model.no_sync():
        loss(model, *batch(0, 0, 0, 2), skip=False).backward()
    with pytest.raises(StateError, match="gradients are accumulated"):
        shard_optimizer(make(model), model)
    model.reset()
    first = shard_optimizer(make(model), model)
    second = shard_optimizer(make(model), model)  # takes over
    assert first.param_groups[0]["params"][0] is second.param_groups[0]["params"][0]
    with pytest.raises(StateError, match="this optimizer is sharded already"):
        shard_optimizer(second, model)
    with pytest.raises(StateError, match="Adafactor needs whole ones"):
        shard_optimizer(torch.optim.Adafactor(model.parameters()), model)
    loss(model, *batch(0, 0, 0, 2), skip=False).backward()
    with pytest.raises(StateError, match="lies in shards over the ranks: clip with clip_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair[1].weight.data = pair[0].weight.data
    shared = DataParallelBucket(pair, group=c10d.group.WORLD)
    with pytest.raises(StateError, match="shares memory with another tensor"):
        shard_optimizer(torch.optim.SGD(shared.parameters()), shared)
    memory = torch.zeros(5, 4)
    rows = nn.Linear(4, 4, bias=False)
    rows.weight.data = memory[:4]
    rows.register_buffer("last", memory[3:])  # the weight's last row is this one's first
    shared = DataParallelBucket(rows, group=c10d.group.WORLD)
    with pytest.raises(StateError, match="weight shares memory with another tensor"):
        shard_optimizer(torch.optim.SGD(shared.parameters()), shared)


def check_left_out():
    """Parameters the optimizer does not have, or that stages tie, are summed whole."""
    torch.manual_seed(0)
    net = Net().double()
    net.tied_parameters = {"embed.weight": (0, 1)}
    model = DataParallelBucket(net, bucket_size=50, group=c10d.group.WORLD)
    sharded = [net.layers[0].weight, net.embed.weight]
    optimizer = shard_optimizer(torch.optim.SGD(sharded, lr=0.1), model)
    ranks, rank = c10d.get_world_size(), c10d.get_rank()
    loss(model, *batch(0, 0, rank, ranks), skip=False).backward()
    assert net.embed.weight.grad.norm() > 0
    assert net.raw.weight.grad.norm() > 0
    before = net.embed.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, net.embed.weight)
    names = {shard.name for shard in parameter_shards(model) if not shard.replicated}
    assert names <= {"layers.0.weight"}
    sums = all_gather_object(net.embed.weight.sum().item())
    assert sums == [sums[0]] * 2


def pair(**options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2)).double()
    model = DataParallelBucket(copy.deepcopy(plain), group=c10d.group.WORLD, **options)
    return model, plain


def rows(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double()


def assert_equal_weights(model, plain):
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, msg=name)


def check_several_optimizers():
    """Each optimizer shards its own parameters, forgets its own gradients, keeps foreign ones."""
    model, plain = pair()
    extra, other = nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2).double())

    def make(net, scale):
        layers = list(net.module if hasattr(net, "module") else net)
        one = torch.optim.AdamW([*layers[0].parameters(), scale], lr=0.1)
        return one, torch.optim.Muon([layers[1].weight], lr=0.1)

    one, two = make(model, extra)
    shard_optimizer(one, model, stage=1)
    shard_optimizer(two, model, stage=1, overlap=True)
    first, second = make(plain, other)
    names = {shard.name for shard in parameter_shards(model) if not shard.replicated}
    assert names <= {"0.weight", "0.bias", "1.weight"}
    assert one.param_groups[0]["params"][-1] is extra
    for step in range(4):
        (model(rows(c10d.get_rank())) * extra).square().sum().backward()
        for rank in range(2):
            (plain(rows(rank)) * other).square().sum().backward()
        c10d.all_reduce(extra.grad)
        torch.testing.assert_close(extra.grad, other.grad)
        for ours, theirs in ((one, first),) if step % 2 else ((one, first), (two, second)):
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
        if step % 2 == 0:
            model.module[1].bias.grad = model.module[2].weight.grad = None
            model.module[2].bias.grad = None
            for p in [plain[1].bias, *plain[2].parameters()]:
                p.grad = None
    model.wait_for_parameters()
    assert_equal_weights(model, plain)
    torch.testing.assert_close(extra, other)


def check_changed_between():
    """Change gradients and parameters between backward and step: it counts, or is refused."""
    model, plain = pair()
    ours = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for net, ranks in ((model, [c10d.get_rank()]), (plain, range(2))):
        layers = net.module if net is model else net
        for rank in ranks:
            net(rows(rank)).square().sum().backward()
        layers[0].weight.grad = None
        layers[1].zero_grad()
        layers[2].weight.grad = torch.ones_like(layers[2].weight)
    ours.step(), theirs.step()
    kept = copy.deepcopy(model.state_dict())
    ours.step()  # parameters under way again
    model.load_state_dict(kept)
    assert_equal_weights(model, plain)
    model.reset()
    state = ours.state_dict()
    ours.load_state_dict(state)
    with pytest.raises(StateError, match="another rank or layout"):
        ours.load_state_dict({**state, "shards": ["0.weight[0:1]"]})
    file = io.BytesIO()
    torch.save(model.module, file)
    model.module.float().double()
    with pytest.raises(StateError, match=r"2\.bias has been moved or replaced since"):
        ours.step()
    module = model.module
    del model, ours
    again = DataParallelBucket(module, group=c10d.group.WORLD)
    shard_optimizer(torch.optim.SGD(again.parameters(), lr=0.1), again)


def check_loaded_while_under_way(below):
    """Rank 1 fetches only once rank 0 has loaded, or a second later: rank 0 must have waited."""
    model, _ = pair()
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    model(rows(c10d.get_rank())).square().sum().backward()
    zeros = {name: torch.zeros_like(value) for name, value in model.module.state_dict().items()}
    store = c10d.distributed_c10d._get_default_store()
    if c10d.get_rank() == 1:
        with contextlib.suppress(RuntimeError):  # it is time
            store.wait(["loaded"], timedelta(seconds=1))
    optimizer.step()
    if below:
        for name, layer in model.module.named_children():
            layer.load_state_dict(
                {"weight": zeros[f"{name}.weight"], "bias": zeros[f"{name}.bias"]}
            )
    else:
        model.module.load_state_dict(zeros)
    store.set("loaded", "")
    model.wait_for_parameters()
    c10d.barrier()
    for value in model.module.state_dict().values():
        assert not value.any()


@pytest.mark.parametrize("below", ["", "layers"])
def test_what_is_loaded_is_not_overwritten_by_what_is_under_way(below):
    run_ranks(check_loaded_while_under_way, 2, below)  # of whose store each start has its own


def check_earlier_gradients():
    model, plain = pair()
    model(rows(c10d.get_rank())).sum().backward()
    for rank in range(2):
        plain(rows(rank)).sum().backward()
    shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_equal_weights(model, plain)


def check_swapped_masters():
    """Parameters put away for an evaluation and back leave the masters' digits alone."""
    torch.manual_seed(0)
    model = DataParallelBucket(nn.Linear(4, 4).bfloat16(), torch.float32, group=c10d.group.WORLD)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    for swap in (False, True):
        before = [shard.tensor.detach().clone() for shard in parameter_shards(model)]
        for _ in range(50):
            if swap:
                state = copy.deepcopy(model.state_dict())
                model.load_state_dict({name: value * 0 for name, value in state.items()})
                model.load_state_dict(state)
            model(torch.ones(1, 4).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for shard, old in zip(parameter_shards(model), before, strict=True):
            torch.testing.assert_close(old - shard.tensor, torch.full_like(old, 0.01))


def check_memory():
    """A gradient that comes before the others of its bucket keeps no memory for these."""
    model = DataParallelBucket(nn.Linear(16, 16), group=c10d.group.WORLD)
    shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=2)
    model(torch.ones(1, 16)).sum().backward(inputs=[model.module.bias])
    found = [s.tensor.grad for s in parameter_shards(model) if s.tensor.grad is not None]
    assert len(found) == (c10d.get_rank() == 0)  # biases lie in front
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in found)


CHECKS = [
    check_memory,
    check_refusals,
    check_left_out,
    check_several_optimizers,
    check_changed_between,
    check_earlier_gradients,
    check_swapped_masters,
]


def test_gradients_parameters_and_masters_in_shards_are_followed_or_refused():
    run_ranks(in_turn, 2, CHECKS, timeout=200)


class Parts(nn.Module):
    """Two parts, of which a backward reaches one, as chunks of a pipeline do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)])
        self.told = None

    def forward(self, x, which):
        self.told = which[0]
        return sum(self.parts[at](x) for at in which)

    def backward(self, _, output, gradient):
        output.backward(gradient)

    def parameters(self, recurse=True):
        yield from super().parameters() if self.told is None else self.parts[self.told].parameters()


def _backwards_of_parts(ways):
    """Return how many buckets each backward through parts summed, and errors of gradients."""
    rank = c10d.get_rank()
    plain = Parts()
    model = DataParallelBucket(Parts(), group=c10d.group.WORLD, op="sum", bucket_size=1)
    shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, stage=2)
    sums = []
    with mock.patch.object(
        sharded.ShardedBucket, "_start", autospec=True, side_effect=sharded.ShardedBucket._start
    ) as start:
        for number, of_ranks in enumerate(ways):
            for other, which in enumerate(of_ranks):
                x = torch.full((3, 4), 1.0 + other + number, dtype=torch.float64)
                plain(x, which).square().sum().backward()
                if other == rank:
                    out = model(x, which)
                    model.backward(None, out.square().sum(), None)
            sums.append(start.call_count - sum(sums))
    found = whole_gradients(model)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    return sums, worst(relative_error(found[name], wanted[name]) for name in wanted)


def test_a_backward_sums_the_buckets_that_it_may_reach():
    # Of each rank the parts that it uses; the first is what it says it may reach.
    ways = [[(0,), (0,)], [(1,), (1,)], [(0,), (0,)]]
    for sums, error in run_ranks(_backwards_of_parts, 2, ways):
        assert error <= 1e-14
        assert sums == [2, 2, 2]

"""Options of the wrapper, and models and values that must be equal on all ranks."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as c10d
from in_turn import assert_same_gradients, for_each, in_turn
from torch import nn

from scaletorch.dist import all_gather_object
from scaletorch.dist.errors import InvalidArgumentError, MismatchError, NonFiniteError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, DataParallelNaive, shard_optimizer
from scaletorch.parallel.data_parallel.buckets import bucket


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5, bias=False), nn.LayerNorm(5)]
    return nn.Sequential(*layers).to(dtype)


def wrap(module, **options):
    return DataParallelBucket(module, group=c10d.group.WORLD, **options)


def rows(micro, dtype=torch.float32):
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(micro)).to(dtype)


def check_wire():
    seen = []
    original = bucket.all_reduce_flat

    def noting(data, *args, **options):
        seen.append(data.dtype)
        return original(data, *args, **options)

    model, plain = wrap(net(), reduce_dtype=torch.bfloat16), net()
    with mock.patch.object(bucket, "all_reduce_flat", noting):
        model(rows(c10d.get_rank())).sum().backward()
    assert set(seen) == {torch.bfloat16}
    parts = []
    for rank in range(2):
        plain.zero_grad()
        plain(rows(rank)).sum().backward()
        parts.append([p.grad.to(torch.bfloat16) for p in plain.parameters()])
    for found, one, other in zip(model.parameters(), *parts, strict=True):
        assert torch.equal(found.grad, (one + other).float())


def float32_sums(plain, micros):
    """Return sums in float32 of a bfloat16 model's gradients over micro-batches."""
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
    for micro in micros:
        plain.zero_grad()
        plain(rows(micro, torch.bfloat16)).sum().backward()
        for total, p in zip(sums, plain.parameters(), strict=True):
            total += p.grad
    return sums


def check_main_gradients():
    """Sums of many small bfloat16 gradients are float32's, with the same bits."""
    ranks, rank, micros = c10d.get_world_size(), c10d.get_rank(), 40
    plain = net(torch.bfloat16)
    model = wrap(copy.deepcopy(plain), grad_type=torch.float32, bucket_size=40)
    for micro in range(micros):
        with model.no_sync() if micro < micros - 1 else contextlib.nullcontext():
            model(rows(micro * ranks + rank, torch.bfloat16)).sum().backward()
    sums = [float32_sums(plain, range(each, micros * ranks, ranks)) for each in range(ranks)]
    for parameter, *totals in zip(model.parameters(), *sums, strict=True):
        assert torch.equal(parameter.grad, sum(totals).to(torch.bfloat16))


def check_one_rounding(stage):
    """Sums of 16-bit gradients are those of float32, rounded once or not at all."""
    plain = net(torch.bfloat16)
    model = wrap(copy.deepcopy(plain), bucket_size=40)
    if stage:
        shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    model(rows(c10d.get_rank(), torch.bfloat16)).sum().backward()
    sums = float32_sums(plain, range(c10d.get_world_size()))
    exact = dict(zip((name for name, _ in plain.named_parameters()), sums, strict=True))
    for shard in model.optimizer_shards or ():
        whole = exact[shard.name].view(-1)[shard.start : shard.stop]
        assert torch.equal(shard.tensor.grad.view(-1), whole), shard.name
    if not stage:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, exact[name].bfloat16())


def test_sums_of_16_bit_gradients_are_rounded_once():
    run_ranks(in_turn, 4, [partial(check_one_rounding, stage) for stage in (0, 2)])


@distributed_test(3)
def test_initial_values_are_compared_or_sent():
    rank = c10d.get_rank()

    def build():
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        if rank:
            torch.manual_seed(rank)
            nn.init.normal_(module[0].weight)
            module[1].running_mean += 1
        return module

    torch.manual_seed(0)
    with pytest.raises(
        MismatchError, match=r"values to begin with \(pass init_sync='broadcast'"
    ) as e:
        wrap(build())
    for name in ("0.weight", "1.running_mean"):
        assert f"{name} has values" in str(e.value)
    assert "0.bias has" not in str(e.value)
    torch.manual_seed(0)
    model = wrap(build(), init_sync="broadcast")
    everyone = all_gather_object([t.tolist() for t in model.state_dict().values()])
    assert everyone == [everyone[0]] * len(everyone)
    assert model.module[1].running_mean.tolist() == [0, 0, 0]  # the first rank's
    torch.manual_seed(0)
    loose = wrap(build(), init_sync="none")
    assert len({float(w) for w in all_gather_object(loose.module[0].weight[0, 0].item())}) == 3
    with pytest.raises(InvalidArgumentError, match="init_sync must be one of 'check', 'broadcast'"):
        wrap(build(), init_sync="yes")


def check_finite():
    rank = c10d.get_rank()
    model = wrap(net(), check_finite=True, bucket_size=40)
    x = rows(0)
    if rank == 1:
        x[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"not finite: 0.weight on rank 1.*none was summed"):
        model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    plain = net()
    for _ in range(2):
        model(rows(rank)).sum().backward()
    for each in range(2):
        plain(rows(each)).mul(2).sum().backward()
    assert_same_gradients(model, plain, None)


class Backwards(nn.Module):
    """Uses its layers in another order than it registers them; the ranks in two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))

    def forward(self, x):
        order = (2, 0, 3, 1) if c10d.get_rank() == 0 else (0, 1, 2, 3)
        for at in order:
            x = self.layers[at](x)
        return x


def check_order():
    torch.manual_seed(0)
    model, plain = wrap(Backwards(), bucket_size=18), None
    plain = copy.deepcopy(model.module)
    before = [each["parameters"] for each in model.get_bucket_info()]
    assert before == [[f"layers.{a}.weight" for a in pair] for pair in ((3, 2), (1, 0))]
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
    after = [each["parameters"] for each in model.get_bucket_info()]
    assert after == [[f"layers.{a}.weight" for a in pair] for pair in ((1, 3), (0, 2))]
    totals = [0.0] * 4
    plain(torch.ones(1, 3)).sum().backward()
    for at, parts in enumerate(zip(*all_gather_object([p.grad for p in plain.parameters()]),
                                   strict=True)):  # fmt: skip
        totals[at] = sum(parts)
        torch.testing.assert_close(model.layers[at].weight.grad, totals[at])


def check_memory():
    model = wrap(net())
    pointers, kept = [], []
    for step in range(6):
        model.zero_grad()
        model(rows(step)).sum().backward()
        grad = model.module[0].weight.grad
        pointers.append(grad.untyped_storage().data_ptr())
        if step in (2, 4):  # as for a log, or to add up two losses' gradients by hand
            kept.append((grad if step == 2 else grad[1:].detach(), grad.clone()))
        del grad
    assert pointers[1] == pointers[2]
    assert len(set(pointers[2:])) == 3  # a buffer that is still looked at is left alone
    assert torch.equal(*kept[0])
    assert torch.equal(kept[1][0], kept[1][1][1:])


def check_out_of_step():
    """Ranks that ran backward a different number of times are told, before sums are mixed."""
    model = wrap(net())
    model(rows(0)).sum().backward()
    if c10d.get_rank():
        model.zero_grad()
    adds = c10d.get_rank() == 0
    with pytest.raises(
        MismatchError, match=rf"some ranks and begins .*it adds on this rank: {adds}"
    ):
        model(rows(0)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model(rows(0)).sum().backward()


def backward(model, *, synced=True):
    with contextlib.nullcontext() if synced else model.no_sync():
        model(rows(c10d.get_rank())).sum().backward()


def check_no_sync_alone(none, first):
    """A rank that was in no_sync alone is a step ahead of the others when it next meets them."""
    model, alone = wrap(net()), c10d.get_rank() == 0
    if not first:
        backward(model)
        model.zero_grad(none)
    if alone:
        backward(model, synced=False)
        model.zero_grad(none)
    found = f"made and dropped gradients {int(alone)} times .* other ranks 0 to 1 times"
    with pytest.raises(MismatchError, match=f"rank {c10d.get_rank()}.*{found}: only some were in"):
        backward(model)
    assert all(p.grad is None for p in model.parameters())
    backward(model)


def check_no_sync_unevenly():
    """Ranks may accumulate another number of times, drop gradients together, and reset alone."""
    model, plain, rank = wrap(net()), net(), c10d.get_rank()
    for _ in range(2):
        backward(model, synced=False)
        model.zero_grad()
    if rank:
        backward(model, synced=False)
        model.reset()
    for _ in range(2 * rank):
        backward(model, synced=False)
    backward(model)
    for r in (0, 1, 1, 1):
        plain(rows(r)).sum().backward()
    assert_same_gradients(model, plain, None)


def check_hooks_of_users():
    model, plain = wrap(net()), net()
    model.module[0].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", p.grad * 2)
    )
    model(rows(c10d.get_rank())).sum().backward()
    for rank in range(2):
        plain(rows(rank)).sum().backward()
    torch.testing.assert_close(model.module[0].weight.grad, plain[0].weight.grad * 2)
    with pytest.raises(
        StateError, match=r"3\.weight was torch.float32 when it was wrapped, and is"
    ):
        model.double()(rows(0).double()).sum().backward()


def check_refusal():
    alone = c10d.new_group([1])
    module = nn.Linear(2, 2)
    torch.manual_seed(0)
    nn.init.ones_(module.weight), nn.init.ones_(module.bias)
    rank = c10d.get_rank()
    taken = DataParallelBucket(module, torch.float64, group=alone) if rank else None
    with pytest.raises((StateError, MismatchError), match="would be synchronised twice"):
        wrap(module)
    del taken


def test_gradients_are_as_asked_for_and_as_hooks_of_the_users_leave_them():
    checks = [check_wire, check_main_gradients, check_order, check_memory]
    checks += [check_no_sync_unevenly, check_hooks_of_users]
    run_ranks(in_turn, 2, checks)


def test_ranks_that_are_not_in_step_and_gradients_that_are_not_finite_are_named():
    no_sync = [partial(check_no_sync_alone, *each) for each in product((True, False), repeat=2)]
    run_ranks(in_turn, 2, [check_finite, check_out_of_step, *no_sync, check_refusal])


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(2, 3), nn.Linear(3, 4)


class Plain(nn.Module):
    def __init__(self, width=3, frozen=False):
        super().__init__()
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, 4)
        self.first.requires_grad_(not frozen)


ODD = {
    "name": (Renamed, ["- second.weight (4, 3) torch.float32", "+ other.weight"]),
    "shape": (lambda: Plain(5), ["- first.weight (3, 2)", "+ first.weight (5, 2)"]),
    "dtype": (lambda: Plain().double(), ["- first.weight (3, 2) torch.float32", "torch.float64"]),
    "frozen": (lambda: Plain(frozen=True), ["+ first.weight (3, 2) torch.float32 frozen"]),
}


def check_mismatch(kind):
    build, expected = ODD[kind]
    model = build() if c10d.get_rank() == 1 else Plain()
    with pytest.raises(MismatchError) as caught:
        wrap(model)
    message = str(caught.value)
    assert "rank 1 (+), ranks 0, 2 (-)" in message
    assert f"this is rank {c10d.get_rank()}" in message
    for part in expected:
        assert part in message, kind


def check_options():
    rank = c10d.get_rank()
    with pytest.raises(
        MismatchError, match=r"\+ wrapper=DataParallelBucket, op=sum, bucket_size=7"
    ):
        DataParallelBucket(Plain(), bucket_size=7 if rank == 2 else 8, group=c10d.group.WORLD)
    with pytest.raises(MismatchError, match=r"op=mean"):
        DataParallelNaive(Plain(), op="mean" if rank else "sum", group=c10d.group.WORLD)
    DataParallelNaive(Plain(), group=c10d.group.WORLD)  # and the group still works


def test_every_rank_reports_the_odd_one():
    run_ranks(in_turn, 3, [*for_each(check_mismatch, product(ODD)), check_options])

"""Collectives over dicts, parameters and seeds."""

from unittest import mock

import pytest
import torch
import torch.distributed as c10d
from torch import nn

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, MismatchError, NotInGroupError, params
from scaletorch.dist.testing import distributed_test, run_ranks


@distributed_test(world_size=2)
def test_a_dict_is_reduced_in_place_whatever_the_order_of_its_keys():
    rank = dist.get_rank()
    data = {
        "loss": torch.tensor(0.5 + rank, requires_grad=True),
        "count": torch.tensor([3, 4 + rank]),
        "half": torch.ones(2, 3, dtype=torch.bfloat16).t(),
        "flag": torch.tensor([rank == 0, False]),
        "wide": torch.ones(600_000),
        "empty": torch.empty(0),
    }
    kept = dict(data)
    if rank:
        data = dict(reversed(data.items()))
    assert dist.all_reduce_dict(data) is None
    assert all(data[key] is kept[key] for key in kept)
    assert data["loss"].item() == 2.0
    assert data["count"].tolist() == [6, 9]
    assert data["half"].tolist() == [[2, 2]] * 3
    assert data["flag"].view(torch.uint8).tolist() == [1, 0]
    assert (data["wide"] == 2).all()
    assert data["half"].dtype == torch.bfloat16
    dist.all_reduce_dict(data, "mean")
    assert data["count"].tolist() == [6, 9]


@distributed_test(world_size=3)
def test_dicts_that_differ_are_named_on_every_rank():
    rank = dist.get_rank()
    one, two = torch.ones(1), torch.ones(2)
    for data, text in (
        ({"a": one, "b" if rank else "c": one}, r"rank 0 \(\+\).*\n  - b: .*\n  \+ c: "),
        ({"a": one if rank != 1 else two}, r"rank 1 \(\+\).*\n  - a: .*\n  \+ a: float32\[2\]"),
        ({"a": one if rank != 2 else one.double()}, r"\n  \+ a: float64\[1\]"),
        ({"a": one} if rank else {}, r"rank 0 \(\+\), ranks 1, 2 \(-\):\n  - a: float32\[1\]"),
    ):
        with pytest.raises(MismatchError, match=text):
            dist.all_reduce_dict(data)
    assert one.item() == 1
    dist.all_reduce_dict({})
    dist.all_reduce_dict({"a": one})
    assert one.item() == 3


def refuse():
    one = torch.ones(1)
    for text, call in {
        "strings for keys, got the key 3": lambda: dist.all_reduce_dict({"a": one, 3: one}),
        "strings for keys, got list": lambda: dist.all_reduce_dict([one]),
        r"tensor for data\['a'\], got float": lambda: dist.all_reduce_dict({"a": 1.0}),
        "unknown reduce operation 'x'": lambda: dist.all_reduce_dict({"a": one}, "x"),
        "float32 with op 'bor'": lambda: dist.all_reduce_params([one], op="bor"),
        "iterable of tensors, got Tensor": lambda: dist.all_reduce_params(one),
        "iterable of tensors, got dict": lambda: dist.all_reduce_params({"a": one}),
        r"tensor for params\[1\], got int": lambda: dist.all_reduce_params([one, 2]),
        "positive, or -1 for no limit, got 0": lambda: dist.all_reduce_params([one], True, 0),
        "positive, or -1 for no limit, got inf": lambda: dist.all_reduce_params(
            [one], True, float("inf")
        ),
        "positive, or -1 for no limit, got '1'": lambda: dist.all_reduce_params([one], True, "1"),
    }.items():
        with pytest.raises(InvalidArgumentError, match=text):
            call()


@pytest.mark.parametrize("size", [0, 2])
def test_bad_arguments(size):
    run_ranks(refuse, size) if size else refuse()


@pytest.mark.parametrize(("coalesce", "bucket"), [(True, -1), (True, 0.00001), (False, 1)])
@distributed_test(world_size=2)
def test_parameters_of_any_kind_are_reduced_in_place(coalesce, bucket):
    model = nn.Sequential(nn.Linear(300, 1000), nn.Linear(8, 4).double(), nn.BatchNorm1d(4))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(dist.get_rank() + 1)
    assert dist.all_reduce_params(model.parameters(), coalesce, bucket) is None
    dist.all_reduce_params(list(model.buffers()), coalesce, bucket, op="mean")
    for parameter in model.parameters():
        assert (parameter == 3).all()
        assert parameter.is_leaf
        assert parameter.requires_grad
    assert model[1].weight.dtype == torch.float64
    assert [buffer.flatten()[0].item() for buffer in model.buffers()] == [1.5, 1.5, 1]


@distributed_test(world_size=2)
def test_buckets_hold_as_many_mebibytes_as_allowed():
    with mock.patch.object(params, "all_reduce", wraps=params.all_reduce) as sent:
        dist.all_reduce_params([torch.ones(100 << 10) for _ in range(5)], True, 1)
        dist.all_reduce_params([torch.ones(1 << 18), torch.ones(1), torch.ones(1)])
    sizes = [call.args[0].nbytes for call in sent.call_args_list]
    assert sizes == [800 << 10, 800 << 10, 400 << 10, 1 << 20, 8]


@distributed_test(world_size=2)
def test_empty_lists_views_and_repeated_tensors():
    dist.all_reduce_params([])
    dist.all_reduce_params(iter(()))
    small, large = torch.ones(4, 2).t(), torch.ones(1 << 19)
    dist.all_reduce_params([small, large, small, large, torch.ones(0)])
    assert (small == 2).all()
    assert (large == 2).all()


@distributed_test(world_size=3)
def test_groups():
    pair = c10d.new_group([0, 2])
    data = {"a": torch.tensor([float(dist.get_rank())])}
    if dist.get_rank() == 1:
        for call in (
            lambda: dist.all_reduce_dict(data, group=pair),
            lambda: dist.all_reduce_params(data.values(), group=pair),
            lambda: dist.sync_random_seed(pair),
        ):
            with pytest.raises(NotInGroupError):
                call()
        return
    dist.all_reduce_dict(data, "mean", pair)
    assert data["a"].item() == 1
    dist.all_reduce_params(data.values(), group=pair)
    assert data["a"].item() == 2
    seeds = dist.all_gather_object(dist.sync_random_seed(pair), pair)
    assert seeds[0] == seeds[1]


def seeds():
    state = torch.get_rng_state()
    drawn = [dist.sync_random_seed() for _ in range(4)]
    assert torch.equal(state, torch.get_rng_state())
    return drawn


def test_seeds_agree_and_are_fresh():
    first, second = run_ranks(seeds, 2)
    assert first == second
    assert len(set(first)) > 1
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in [*first, *seeds()])

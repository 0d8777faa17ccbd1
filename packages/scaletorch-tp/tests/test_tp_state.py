"""State: the plain model's, bit for bit, from and to any tensor-parallel size."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import get_rank, group

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import (
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
)

PLAN = {"embed": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column_gather"}


class Net(nn.Module):
    def __init__(self, seed, tied=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(8, 12)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(12, 4), "down": nn.Linear(4, 12)}) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 8, bias=False)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight


def sharded(*args, **options):
    return apply_tensor_parallel(Net(*args, **options), PLAN, group.WORLD)


def same(got, expected):
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert got[name].is_contiguous()
        assert torch.equal(got[name], value), name


def round_trip(state, tied, dtype):
    """Load a whole state into a differently drawn model and give it back."""
    model = sharded(1, tied=tied, dtype=dtype)
    given = copy.deepcopy(state)
    load_full_state_dict(model, state)
    same(state, given)
    whole = gather_state_dict(model, group.WORLD)
    same(whole, state)
    memory = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    assert not memory & {t.untyped_storage().data_ptr() for t in whole.values()}
    assert (whole["embed.weight"] is whole["head.weight"]) == tied
    assert (model.embed.weight is model.head.weight) == tied
    return whole


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_state_goes_round_all_sizes_bit_for_bit(tied, dtype):
    plain = Net(0, tied=tied, dtype=dtype)
    state = dict(plain.state_dict())
    for tp in (2, 4, 1):
        whole = run_ranks(round_trip, tp, state, tied, dtype)
        for other in whole:
            same(other, plain.state_dict())
        state = whole[-1]
    fresh = Net(3, tied=tied, dtype=dtype)
    fresh.load_state_dict(state)
    same(fresh.state_dict(), plain.state_dict())


def test_one_process_needs_no_group():
    model = apply_tensor_parallel(Net(0), PLAN)
    state = Net(1).state_dict()
    load_full_state_dict(model, state)
    same(gather_state_dict(model), state)


def test_shard_dims_names_every_parameter_also_in_a_copy():
    model = apply_tensor_parallel(Net(0), PLAN)
    expected = {"embed.weight": 0, "norm.weight": None, "norm.bias": None, "head.weight": 0}
    for i in range(2):
        expected |= {f"blocks.{i}.up.weight": 0, f"blocks.{i}.up.bias": 0}
        expected |= {f"blocks.{i}.down.weight": 1, f"blocks.{i}.down.bias": None}
    assert shard_dims(model) == expected
    assert shard_dims(copy.deepcopy(model)) == expected
    assert shard_dims(model.blocks[0].down) == {"weight": 1, "bias": None}
    assert shard_dims(Net(0)) == dict.fromkeys(expected)


@distributed_test(world_size=2)
def test_optimizer_state_is_gathered_alike():
    """Adam's moments are gathered as the parameters are."""
    plain, model = Net(0), sharded(0)
    moments = []
    for net in (plain, model):
        optimizer = torch.optim.Adam(net.parameters())
        for p in net.parameters():
            p.grad = p.detach().clone()
        optimizer.step()
        names = dict(net.named_parameters())
        moments.append({n: optimizer.state[p]["exp_avg"] for n, p in names.items()})
    same(gather_tensors(model, moments[1]), moments[0])


@distributed_test(world_size=2)
def test_a_tied_name_may_be_missing_and_strictness_waived():
    model, state = sharded(1), Net(0).state_dict()
    del state["head.weight"]  # tied: the other name is enough
    load_full_state_dict(model, state)
    assert torch.equal(gather_state_dict(model)["head.weight"], state["embed.weight"])
    untied = sharded(2, tied=False)
    load_full_state_dict(untied, state | {"else": torch.ones(1)}, strict=False)
    assert torch.equal(gather_state_dict(untied)["embed.weight"], state["embed.weight"])


@distributed_test(world_size=2)
def test_mistakes_load_nothing():
    model, state = sharded(1, tied=False), Net(0, tied=False).state_dict()
    before = gather_state_dict(model)
    small = torch.ones(2, 12)
    for broken, text in (
        ({n: t for n, t in state.items() if n != "head.weight"}, "the state lacks head.weight"),
        (state | {"extra": small}, "the model has no extra"),
        (state | {"embed.weight": small}, r"'embed.weight' has shape \(2, 12\).*has \(8, 12\)"),
        (state | {"norm.weight": small}, r"'norm.weight' has shape \(2, 12\).*has \(12,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            load_full_state_dict(model, broken)
    with pytest.raises(ValueError, match="no parameter or buffer nothing"):
        gather_tensors(model, {"nothing": small})
    with pytest.raises(ValueError, match=r"this rank's shard has \(4, 12\)"):
        gather_tensors(model, {"embed.weight": small})
    with pytest.raises(ValueError, match="is a NoneType, not a tensor"):
        gather_tensors(model, {"embed.weight": model.embed.weight.grad})
    same(gather_state_dict(model), before)


@distributed_test(world_size=2)
def test_ranks_that_gather_different_names_are_told():
    model = sharded(1)
    mine = "embed.weight" if get_rank() else "head.weight"
    with pytest.raises(RuntimeError, match=r"(?s)on the tensors to gather.*\+ embed.weight"):
        gather_tensors(model, {mine: model.embed.weight})


@distributed_test(world_size=2)
def test_a_group_of_another_size_is_refused():
    model = sharded(1)
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][get_rank()]
    for call in (
        lambda: gather_state_dict(model, alone),
        lambda: load_full_state_dict(model, Net(0).state_dict(), alone),
    ):
        with pytest.raises(ValueError, match="has 1 ranks, but the model was sharded over 2"):
            call()

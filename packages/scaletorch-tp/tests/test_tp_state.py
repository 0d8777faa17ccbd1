"""State of every kind of shard: the plain model's bits, at any tp, and in torch's checkpoints."""

import copy
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from gpts import EVERY_SHARD
from gpts import EveryShard as Net
from torch.distributed import broadcast_object_list, checkpoint, get_rank, group, new_group
from torch.overrides import TorchFunctionMode

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import ModuleWrapper, setup_process_group_manager
from scaletorch.parallel.tensor_parallel import (
    PiecesTensor,
    apply_tensor_parallel,
    gather_state_dict,
    gather_tensors,
    load_full_state_dict,
    shard_dims,
    sharded_state_dict,
    split_by_owner,
    take_own,
)


def sharded(seed, tp_group=None):
    return apply_tensor_parallel(Net(seed), EVERY_SHARD, tp_group)


def same(got, expected):
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value), name


# Every tp follows every other.
TOUR = (1, 2, 1, 3, 1, 4, 2, 3, 2, 4, 3, 4, 1)


@distributed_test(world_size=4)
def test_state_goes_from_every_tp_to_every_other_bit_for_bit():
    assert {*pairwise(TOUR)} == {(a, b) for a in range(1, 5) for b in range(1, 5) if a != b}
    groups = {size: new_group(list(range(size))) for size in set(TOUR)}
    expected = Net(0).state_dict()
    state = dict(expected)
    for step, tp in enumerate(TOUR):
        if get_rank() < tp:
            model = sharded(step + 1, groups[tp])
            seen = ModuleWrapper(model) if step % 2 else model  # a wrapper changes nothing
            load_full_state_dict(seen, state)
            for name, parameter in model.named_parameters(remove_duplicate=False):
                assert torch.equal(take_own(seen, name, state[name]), parameter), name
            state = gather_state_dict(seen)
            same(state, expected)
            assert all(value.is_contiguous() for value in state.values())
            assert model.head.weight is model.embed.weight
            assert state["head.weight"] is state["embed.weight"]
            memory = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
            assert not memory & {t.untyped_storage().data_ptr() for t in state.values()}
        box = [state]
        broadcast_object_list(box, 0)
        [state] = box


def test_shard_dims_name_every_parameter_also_in_a_copy():
    model = sharded(0)
    dims = shard_dims(model)
    expected = {"embed.weight": 0, "head.weight": 0, "down.weight": 1, "down.bias": None}
    assert expected.items() <= dims.items()
    assert dims["packed.weight"] == 1  # a transposed layer
    assert shard_dims(copy.deepcopy(model)) == dims
    assert shard_dims(model.down) == {"weight": 1, "bias": None}
    assert shard_dims(Net(0)) == dict.fromkeys(dims)


@distributed_test(world_size=2)
def test_optimizer_state_is_gathered_as_parameters_are():
    plain, model = Net(0), sharded(0, group.WORLD)
    moments = []
    for net in (plain, model):
        optimizer = torch.optim.Adam(net.parameters())
        for p in net.parameters():
            p.grad = p.detach().clone()
        optimizer.step()
        moments.append({n: optimizer.state[p]["exp_avg"] for n, p in net.named_parameters()})
    same(gather_tensors(model, moments[1]), moments[0])


class Splits(TorchFunctionMode):
    """Notes which tensors are split."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.split:
            self.found.append(args[0])
        return func(*args, **(kwargs or {}))


@distributed_test(world_size=2)
def test_every_rank_splits_in_one_order_and_one_rank_not_at_all():
    # A split of a tensor that FSDP2 shards, too, communicates.
    model, alone = sharded(0, group.WORLD), apply_tensor_parallel(Net(0), EVERY_SHARD, own_group())
    for each, shards in (model, shard_dims(model)), (alone, {}):
        tensors = dict(each.named_parameters())
        expected = [x for name, x in tensors.items() if shards.get(name) is not None]
        with Splits() as splits:
            split_by_owner(each, tensors)
        assert [*map(id, splits.found)] == [*map(id, expected)]


def own_group():
    return [new_group([rank]) for rank in range(2)][get_rank()]


@distributed_test(world_size=2)
def test_a_tied_name_may_be_missing_and_mistakes_load_nothing():
    model, state = sharded(1, group.WORLD), Net(0).state_dict()
    before, small = gather_state_dict(model), torch.ones(2, 10)
    for broken, text in (
        ({n: t for n, t in state.items() if n != "down.bias"}, "the state lacks down.bias"),
        (state | {"extra": small}, "the model has no extra"),
        (state | {"embed.weight": small}, r"'embed.weight' has shape \(2, 10\).*has \(13, 10\)"),
        (state | {"norm.weight": small}, r"'norm.weight' has shape \(2, 10\).*has \(10,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            load_full_state_dict(model, broken)
    with pytest.raises(ValueError, match="no parameter or buffer nothing"):
        gather_tensors(model, {"nothing": small})
    with pytest.raises(ValueError, match=r"this rank's shard has \([67], 10\)"):
        gather_tensors(model, {"embed.weight": small})
    with pytest.raises(ValueError, match="is a NoneType, not a tensor"):
        gather_tensors(model, {"embed.weight": model.embed.weight.grad})
    with pytest.raises(ValueError, match=r"has shape \(2, 10\), but the whole has 4 along dim 0"):
        take_own(model, "attention.k_proj.weight", small)
    mine = "embed.weight" if get_rank() else "head.weight"
    with pytest.raises(RuntimeError, match=r"(?s)on the tensors to gather.*\+ embed.weight"):
        gather_tensors(model, {mine: model.embed.weight})
    alone = [new_group([rank]) for rank in range(2)][get_rank()]
    for call in (
        lambda: gather_state_dict(model, alone),
        lambda: load_full_state_dict(model, state, alone),
    ):
        with pytest.raises(ValueError, match="has 1 ranks, but the model was sharded over 2"):
            call()
    same(gather_state_dict(model), before)
    del state["head.weight"]  # the other name is enough
    load_full_state_dict(model, state | {"else": small}, strict=False)
    same(gather_state_dict(model), Net(0).state_dict())


def save(folder):
    state = sharded_state_dict(sharded(0, group.WORLD))
    expected = Net(0).state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in expected.items()}
    assert isinstance(state["head.weight"], PiecesTensor)
    assert not isinstance(state["norm.weight"], PiecesTensor)
    checkpoint.save(state, checkpoint_id=folder)


def load(folder):
    model = sharded(1, group.WORLD)
    checkpoint.load(sharded_state_dict(model), checkpoint_id=folder)
    same(gather_state_dict(model), Net(0).state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (4, 2), (3, 4), (1, 2)])
def test_torchs_checkpoints_are_loaded_at_another_tp(tmp_path, saved, loaded):
    if saved > 1:
        run_ranks(save, saved, tmp_path)
    else:
        checkpoint.save(dict(Net(0).state_dict()), checkpoint_id=tmp_path, no_dist=True)
    run_ranks(load, loaded, tmp_path)
    for model in (Net(2), sharded(2)):
        checkpoint.load(sharded_state_dict(model), checkpoint_id=tmp_path, no_dist=True)
        same(model.state_dict(), Net(0).state_dict())


@distributed_test(world_size=2)
def test_pieces_share_the_model_s_memory_and_do_not_compute():
    model = sharded(0, group.WORLD)
    state = sharded_state_dict(model)
    whole = state["packed.weight"]
    assert "of (10, 15)" in repr(whole)
    with pytest.raises(ValueError, match=r"cannot compute.*gather_state_dict"):
        whole + 1
    with torch.no_grad():
        model.packed.weight.fill_(7)
    [first, *_] = whole.__create_chunk_list__()
    index = checkpoint.metadata.MetadataIndex("packed.weight", first.offsets)
    assert whole.__get_tensor_shard__(index).unique() == 7


def in_a_grid(folder):
    setup_process_group_manager(tp_size=2, dp_size=2)
    state = sharded_state_dict(sharded(0))
    checkpoint.save(state, checkpoint_id=folder / "made")
    model = sharded(1)
    checkpoint.load(sharded_state_dict(model), checkpoint_id=folder / "made")
    same(gather_state_dict(model), Net(0).state_dict())
    later = checkpoint.async_save(state, checkpoint_id=folder / "later")
    for tensor in state.values():  # what was staged is a copy
        getattr(tensor, "_local", tensor).zero_()
    later.result()
    load(folder / "later")


def test_replicas_of_the_model_write_it_once_also_later(tmp_path):
    run_ranks(in_a_grid, 4, tmp_path)
    written = checkpoint.FileSystemReader(tmp_path / "made").read_metadata().state_dict_metadata
    for name, tensor in Net(0).state_dict().items():
        volumes = [math.prod(chunk.sizes) for chunk in written[name].chunks]
        assert sum(volumes) == tensor.numel()


def test_importing_the_package_imports_neither_checkpoints_nor_the_compiler():
    program = (
        "import sys, scaletorch.parallel.tensor_parallel;"
        "sys.exit(any(m.startswith(('torch.distributed.tensor', 'torch.distributed.checkpoint',"
        "'torch._dynamo')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

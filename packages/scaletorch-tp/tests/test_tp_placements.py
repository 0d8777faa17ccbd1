"""State of every kind of shard, from any tp to any other, also by torch's own checkpoints."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from gpts import EVERY_SHARD
from gpts import EveryShard as Net
from torch.distributed import broadcast_object_list, checkpoint, get_rank, group, new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.placement import Cut
from scaletorch.parallel.tensor_parallel import (
    Pieces,
    PiecesTensor,
    apply_tensor_parallel,
    as_dtensors,
    gather_state_dict,
    load_full_state_dict,
    placements,
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


def tour():
    groups = {size: new_group(list(range(size))) for size in set(TOUR)}
    expected = Net(0).state_dict()
    state = dict(expected)
    for step, tp in enumerate(TOUR):
        if get_rank() < tp:
            model = sharded(step + 1, groups[tp])
            load_full_state_dict(model, state)
            state = gather_state_dict(model)
            same(state, expected)
            assert model.head.weight is model.embed.weight
        box = [state]
        broadcast_object_list(box, 0)
        [state] = box


def test_state_goes_from_every_tp_to_every_other_bit_for_bit():
    assert {*pairwise(TOUR)} == {(a, b) for a in range(1, 5) for b in range(1, 5) if a != b}
    run_ranks(tour, 4)


def placed():
    return placements(sharded(0, group.WORLD))


def test_placements_are_torchs_where_it_has_a_word():
    two, four = run_ranks(placed, 2), run_ranks(placed, 4)
    assert all(found == two[0] for found in two)
    assert all(found == four[0] for found in four)
    assert two[0].keys() == {name for name, _ in Net(0).named_parameters(remove_duplicate=False)}
    assert two[0]["embed.weight"] == two[0]["head.weight"] == Shard(0)  # 7 6, as DTensor cuts 13
    assert two[0]["down.weight"] == two[0]["attention.o_proj.weight"] == Shard(1)
    assert two[0]["norm.weight"] == two[0]["down.bias"] == Replicate()
    # 4 3 3 3, where DTensor has 4 4 4 1.
    uneven = ((range(4),), (range(4, 7),), (range(7, 10),), (range(10, 13),))
    assert four[0]["head.weight"] == Pieces(0, uneven)
    assert four[0]["attention.q_proj.weight"] == Shard(0)
    heads = ((range(2),), (range(2),), (range(2, 4),), (range(2, 4),))
    assert four[0]["attention.k_proj.bias"] == Pieces(0, heads)
    parts = (range(3), range(6, 9), range(11, 13)), (range(3, 6), range(9, 11), range(13, 15))
    assert two[0]["packed.weight"] == Pieces(1, parts)
    assert set(map(str, placements(Net(0)).values())) == {str(Replicate())}


def test_ranges_are_what_is_taken():
    for tp, found in ((n, run_ranks(placed, n)[0]) for n in (3, 4)):
        model = Net(0)
        for name in ("packed.weight", "gate_up.bias", "attention.v_proj.weight", "embed.weight"):
            place = found[name]
            whole = model.get_parameter(name)
            assert isinstance(place, Pieces)
            assert len(place.ranks) == tp
            covered = {i for ranges in place.ranks for r in ranges for i in r}
            assert covered == set(range(whole.shape[place.dim]))
    assert Cut.of((3, 2), (0, 0, 1)).ranges[1] == (range(3),)


def save(folder):
    model = sharded(0, group.WORLD)
    state = as_dtensors(model)
    assert isinstance(state["norm.num_batches_tracked"], DTensor)
    for name, place in placements(model).items():
        assert isinstance(state[name], PiecesTensor if isinstance(place, Pieces) else DTensor)
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        name: tuple(t.shape) for name, t in Net(0).state_dict().items()
    }
    checkpoint.save(state, checkpoint_id=folder)


def load(folder):
    model = sharded(1, group.WORLD)
    checkpoint.load(as_dtensors(model), checkpoint_id=folder)
    same(gather_state_dict(model), Net(0).state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (4, 2), (3, 4), (1, 2)])
def test_torchs_checkpoints_are_loaded_at_another_tp(tmp_path, saved, loaded):
    run_ranks(save, saved, tmp_path) if saved > 1 else save_plain(tmp_path)
    run_ranks(load, loaded, tmp_path)
    load_plain(tmp_path)


def save_plain(folder):
    checkpoint.save(dict(Net(0).state_dict()), checkpoint_id=folder, no_dist=True)


def load_plain(folder):
    for model in (Net(2), sharded(2)):
        checkpoint.load(as_dtensors(model), checkpoint_id=folder, no_dist=True)
        same(model.state_dict(), Net(0).state_dict())


def mesh_given():
    model = sharded(0, group.WORLD)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    state = as_dtensors(model, mesh["tp"])
    assert state["down.weight"].device_mesh == mesh["tp"]
    assert torch.equal(state["down.weight"].full_tensor(), Net(0).down.weight)
    with pytest.raises(ValueError, match=r"one of 2 dims; slice it, as in mesh\['tp'\]"):
        as_dtensors(model, mesh)
    with pytest.raises(ValueError, match="number 0 of 1, but the model was sharded with it as"):
        as_dtensors(model, mesh["dp"])
    whole = state["packed.weight"]
    assert "of (10, 15)" in repr(whole)
    with pytest.raises(ValueError, match=r"cannot compute.*gather_state_dict"):
        whole + 1
    ours = model.packed.weight
    state = as_dtensors(model)
    with torch.no_grad():
        ours.fill_(7)
    [first, *_] = state["packed.weight"].__create_chunk_list__()
    index = checkpoint.metadata.MetadataIndex("packed.weight", first.offsets)
    assert state["packed.weight"].__get_tensor_shard__(index).unique() == 7


def test_a_mesh_of_ones_own_must_be_the_axis():
    run_ranks(mesh_given, 2)


def in_a_grid(folder):
    manager = setup_process_group_manager(tp_size=2, dp_size=2)
    for name, mesh in (("made", None), ("given", manager.device_mesh["tp"])):
        state = as_dtensors(sharded(0), mesh)
        checkpoint.save(state, checkpoint_id=folder / name)
        model = sharded(1)
        checkpoint.load(as_dtensors(model, mesh), checkpoint_id=folder / name)
        same(gather_state_dict(model), Net(0).state_dict())
    later = checkpoint.async_save(state, checkpoint_id=folder / "later")
    for tensor in state.values():  # what was staged is a copy
        local = tensor._local if isinstance(tensor, PiecesTensor) else tensor.to_local()
        local.zero_()
    later.result()
    load(folder / "later")


def test_replicas_of_the_model_write_it_once_also_later(tmp_path):
    run_ranks(in_a_grid, 4, tmp_path)
    written = checkpoint.FileSystemReader(tmp_path / "made").read_metadata().state_dict_metadata
    for name, tensor in Net(0).state_dict().items():
        volumes = [math.prod(chunk.sizes) for chunk in written[name].chunks]
        assert sum(volumes) == tensor.numel()


def test_importing_the_package_imports_neither_dtensor_nor_the_compiler():
    program = (
        "import sys, scaletorch.parallel.tensor_parallel;"
        "sys.exit(any(m.startswith(('torch.distributed.tensor', 'torch.distributed.checkpoint',"
        "'torch._dynamo', 'safetensors')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

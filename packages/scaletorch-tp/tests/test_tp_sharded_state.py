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

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.tensor_parallel import (
    PiecesTensor,
    apply_tensor_parallel,
    gather_state_dict,
    load_full_state_dict,
    sharded_state_dict,
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


def save(folder):
    state = sharded_state_dict(sharded(0, group.WORLD))
    expected = Net(0).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == {
        n: tuple(t.shape) for n, t in expected.items()
    }
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
    run_ranks(save, saved, tmp_path) if saved > 1 else save_plain(tmp_path)
    run_ranks(load, loaded, tmp_path)
    load_plain(tmp_path)


def save_plain(folder):
    checkpoint.save(dict(Net(0).state_dict()), checkpoint_id=folder, no_dist=True)


def load_plain(folder):
    for model in (Net(2), sharded(2)):
        checkpoint.load(sharded_state_dict(model), checkpoint_id=folder, no_dist=True)
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
    index = checkpoint.metadata.MetadataIndex("packed.weight", torch.Size((0, 14)))
    with pytest.raises(ValueError, match=r"no piece of 'packed.weight' begins at"):
        whole.__get_tensor_shard__(index)


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

"""Checkpoints of one process: what is restored, what is refused, and what is never touched."""

import builtins
import json
import math
import os
import pickle
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpointed import assert_equal
from torch import nn

from scaletorch.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    Saving,
    latest,
    load,
    save,
)
from scaletorch.checkpoint.format.metadata import Chunk, Saved
from scaletorch.checkpoint.state.model_tensors import describe
from scaletorch.checkpoint.storage import Read, _blocks
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.placement import fuse, share_cut
from scaletorch.parallel.tensor_parallel.building import ParameterCut
from scaletorch.parallel.tensor_parallel.plans.attention import head_cuts


class Program:
    """A model with dropout and buffers, an optimizer and a scheduler with keys of numbers."""

    def __init__(self, seed=0, width=6, optimizer=torch.optim.AdamW):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Linear(width, 3)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3], gamma=0.5)

    def train(self, steps=1):
        for _ in range(steps):
            data = torch.randn(4, 5) * (1 + random.random())
            self.model(data).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def save(self, folder, step, **options):
        options = {"scheduler": self.scheduler} | options
        return save(folder, self.model, self.optimizer, step=step, **options)

    def load(self, folder, **options):
        return load(folder, self.model, self.optimizer, scheduler=self.scheduler, **options)

    def state(self):
        moments = list(self.optimizer.state.values())
        rates = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return dict(self.model.state_dict()), moments, rates, self.scheduler.state_dict()

    def copied(self):
        return pickle.loads(pickle.dumps(self.state()))


@pytest.mark.parametrize(
    ("optimizer", "asynchronous"),
    [
        (torch.optim.AdamW, False),
        (torch.optim.Adafactor, True),
        (torch.optim.RMSprop, True),
        (torch.optim.Rprop, False),
    ],
)
def test_a_plain_program_goes_on_bit_for_bit(tmp_path, optimizer, asynchronous):
    first = Program(optimizer=optimizer).train(1)
    saving = first.save(tmp_path, 1, extra={"epoch": (0, 4)}, asynchronous=asynchronous)
    expected = first.train(3).state()
    assert saving.wait() == latest(tmp_path)
    assert saving.done()
    second = Program(seed=5, optimizer=optimizer)
    loaded = second.load(tmp_path)
    assert (loaded.step, loaded.extra, loaded.folder) == (1, {"epoch": (0, 4)}, latest(tmp_path))
    assert_equal(second.train(3).state(), expected)


def test_momentum_without_a_number_and_parameters_without_a_gradient(tmp_path):
    model = nn.ParameterDict(
        {"used": torch.ones(3), "unused": torch.ones(2), "none": torch.ones(0)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    model["used"].sum().backward()
    optimizer.step()
    save(tmp_path, model, optimizer, step=0)
    other = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.1)
    other.state[model["unused"]]["momentum_buffer"] = torch.ones(2)
    load(tmp_path, model, other)
    assert other.state.keys() == {model["used"]}
    assert_equal(other.state[model["used"]], optimizer.state[model["used"]])
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups[0]["momentum"] == 0.9


def test_a_scalar_parameter_and_its_state(tmp_path):
    model = nn.ParameterList([torch.tensor(2.0)])
    optimizer = torch.optim.Adam(model.parameters())
    model[0].backward()
    optimizer.step()
    save(tmp_path, model, optimizer, step=0)
    expected = optimizer.state.pop(model[0])
    load(tmp_path, model, optimizer)
    assert_equal(optimizer.state[model[0]], expected)


def test_nothing_is_unpickled_or_evaluated(tmp_path, monkeypatch):
    first = Program().train()
    first.save(tmp_path, 1)
    second = Program(seed=5)

    def refuse(*_, **__):
        raise AssertionError("a checkpoint must not be able to run code")

    with monkeypatch.context() as patch:
        for module, name in [
            (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"),
            (builtins, "eval"),
        ]:  # fmt: skip
            patch.setattr(module, name, refuse)
        second.load(tmp_path)
    assert_equal(second.state(), first.state())


def test_the_safetensors_library_reads_the_files(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    model = nn.ParameterList(
        torch.zeros(3, 2, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)
    )
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("count", torch.tensor(7))
    folder = save(tmp_path, model, step=3).wait()
    with safetensors.safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
        for name, tensor in model.state_dict().items():
            found = file.get_tensor(f"model.{name}")
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def change_byte(path, at):
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def truncate(folder):
    path = folder / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 3)


def change_step(folder):
    path = folder / "metadata.json"
    path.write_text(path.read_text().replace('"step":2', '"step":3'))


DAMAGE = {
    "truncated": (truncate, "bytes and was saved with"),
    "last byte": (lambda f: change_byte(f / "rank-00000.safetensors", -1), "checksum"),
    "no file": (lambda f: (f / "rank-00000.safetensors").unlink(), "cannot be read"),
    "half": (lambda f: os.truncate(f / "metadata.json", 200), "as JSON"),
    "no metadata": (lambda f: (f / "metadata.json").unlink(), "cannot be read"),
    "changed": (change_step, "digest"),
    "foreign": (lambda f: (f / "metadata.json").write_text('{"a": 1}'), "not of a checkpoint"),
    "binary": (lambda f: (f / "metadata.json").write_bytes(b"\xff\x80"), "as JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_or_passed_over(tmp_path, kind):
    damage, message = DAMAGE[kind]
    first = Program().train()
    first.save(tmp_path, 1)
    expected = first.copied()
    folder = first.train().save(tmp_path, 2).wait()
    damage(folder)
    second = Program(seed=5).train()
    before = second.copied()
    with pytest.raises(DamagedCheckpointError, match=message):
        second.load(folder)
    assert_equal(second.state(), before)
    with pytest.raises(DamagedCheckpointError, match=rf"{message}[\s\S]*takes step-00000001"):
        second.load(tmp_path, fall_back=False)
    assert_equal(second.state(), before)
    with pytest.warns(UserWarning, match=rf"back to step 1: step-00000002 is .*{message}"):
        assert second.load(tmp_path).step == 1
    assert_equal(second.state(), expected)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(DamagedCheckpointError, match=message):
        second.load(tmp_path)
    first.save(tmp_path, 2)
    assert second.load(tmp_path).step == 2
    known = kind in ("truncated", "last byte", "no file")  # else it may be somebody's: kept
    assert (tmp_path / "step-00000002.damaged").is_dir() == (not known)


def test_what_was_never_finished_is_not_there(tmp_path):
    assert load(tmp_path / "nowhere", nn.Linear(2, 2)) is None
    program = Program().train()
    folder = program.save(tmp_path, 1).wait()
    half = folder.rename(tmp_path / "step-00000001.unfinished")
    assert latest(tmp_path) is None
    assert program.load(tmp_path) is None
    with pytest.raises(DamagedCheckpointError, match="never finished"):
        program.load(half)
    (half / "rank-00007.safetensors").write_text("of an earlier try")
    assert program.save(tmp_path, 1).wait() == latest(tmp_path)
    assert sorted(p.name for p in latest(tmp_path).iterdir()) == [
        "metadata.json",
        "rank-00000.safetensors",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.model.append(nn.Linear(3, 3)), "the checkpoint has no 4.bias, 4.weight"),
        (lambda p: p.model.pop(3), "the model has no 3.bias, 3.weight"),
        (lambda p: p.model.double(), "0.weight is torch.float32 there and torch.float64"),
        (lambda p: setattr(p.model[3], "weight", nn.Parameter(torch.ones(3, 7))),
         r"3.weight has shape \(3, 6\) there and \(3, 7\)"),
        (lambda p: setattr(p.model[3], "bias", p.model[0].bias), "tied to nothing there"),
        (lambda p: p.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
         "no parameters of this model"),
        (lambda p: p.optimizer.add_param_group({"params": []}), "1 groups of parameters"),
    ],
)  # fmt: skip
def test_another_model_is_refused_and_left_alone(tmp_path, change, message):
    Program().train().save(tmp_path, 1)
    Program().train().save(tmp_path, 2)
    other = Program(seed=5).train()
    optimizer, updated = other.optimizer, list(other.model.parameters())
    change(other)
    if not {id(p) for p in updated} <= {id(p) for p in other.model.parameters()}:
        optimizer = None
    before = other.copied()
    with pytest.raises((CheckpointError, InvalidArgumentError), match=message):
        load(tmp_path, other.model, optimizer)
    assert_equal(other.state(), before)


def test_what_was_not_saved_is_not_restored(tmp_path):
    program = Program().train()
    save(tmp_path, program.model, step=1)
    assert load(tmp_path, program.model).step == 1
    with pytest.raises(CheckpointError, match="without an optimizer"):
        load(tmp_path, program.model, program.optimizer)
    with pytest.raises(CheckpointError, match="without a scheduler"):
        load(tmp_path, program.model, scheduler=program.scheduler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "step must be a number"),
        ({"step": 2**63}, "step must be a number of steps"),
        ({"step": 1, "keep": 0}, "keep must be a number"),
        ({"step": 1, "extra": [1]}, r"extra must be a mapping .*got \[1\]"),
        ({"step": 1, "extra": {"data": [object()]}}, r"extra\['data'\] is a object"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        save(tmp_path, nn.Linear(2, 2), **options)
    assert not list(tmp_path.iterdir())


def test_only_old_checkpoints_of_ours_are_removed(tmp_path):
    program = Program().train()
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "step-00000000" / "precious").write_text("not ours")
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "notes").mkdir()
    for step in range(1, 5):
        program.save(tmp_path, step)
        (tmp_path / f"step-{step:08d}" / "mine.txt").write_text(str(step)) if step == 2 else None
    program.save(tmp_path, 5, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes", "scaletorch.lock", "step-00000000", "step-00000002.removed", "step-00000004",
        "step-00000005", "step-00000007",
    ]  # fmt: skip
    left = [p.name for p in (tmp_path / "step-00000002.removed").iterdir()]
    assert left == ["mine.txt"]
    with pytest.raises(CheckpointError, match="is no checkpoint; it stays"):
        program.save(tmp_path, 0)
    program.save(tmp_path, 5, keep=1)  # again: in the place of the first
    assert latest(tmp_path).name == "step-00000005"
    assert not (tmp_path / "step-00000004").exists()


def test_background_errors_are_raised_by_who_waits_and_by_the_next_save(tmp_path, monkeypatch):
    program = Program().train()
    (tmp_path / "step-00000001.unfinished").write_text("in the way")
    saving = program.save(tmp_path, 1, asynchronous=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="step-00000001 failed: FileExistsError"):
            saving.wait()
    saving = program.save(tmp_path, 1, asynchronous=True)
    with pytest.raises(CheckpointError, match="FileExistsError"):
        program.save(tmp_path, 2)
    assert isinstance(program.save(tmp_path, 2), Saving)
    assert latest(tmp_path).name == "step-00000002"


def test_large_tensors_are_checked_in_blocks(tmp_path):
    model = nn.ParameterList([torch.randn(3, 1_000_000)])
    folder = save(tmp_path, model, step=1).wait()
    entry = json.loads((folder / "metadata.json").read_text())["entries"]["model.0"]
    assert len(entry["chunks"][0]["crc32"]) == 3
    expected = model[0].detach().clone()
    model[0].data.zero_()
    load(folder, model)
    assert torch.equal(model[0], expected)
    change_byte(folder / "rank-00000.safetensors", entry["chunks"][0]["offset"] + 5_000_000)
    with pytest.raises(DamagedCheckpointError, match=r"in model\.0: its checksum"):
        load(folder, model)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["uneven shares", "replicated heads", "packed"])
def test_ranks_write_each_element_of_a_shard_once(kind, dim):
    """Four tp ranks; a sharded optimizer has each shard's elements in two ranges."""
    query, heads = head_cuts(8, 2, 4)
    cut = {
        "uneven shares": share_cut(31, 4),
        "replicated heads": heads.times(4),
        "packed": fuse([query.times(4), heads.times(4), heads.times(4)]),
    }[kind]
    shape = (cut.whole, 6, 3) if dim == 0 else (5, cut.whole, 3)
    whole = torch.arange(math.prod(shape)).view(shape)
    written = torch.zeros_like(whole)
    for rank in range(4):
        own = cut.take(whole, dim, rank)
        layer, manager = SimpleNamespace(tp_size=4, tp_rank=rank), SimpleNamespace()
        held = describe(own, ("weight",), ParameterCut(layer, dim, cut), None, manager)
        assert held.shape == shape
        middle = own.numel() * 2 // 5
        for start, stop in ((0, middle), (middle, own.numel())):
            for part in held.parts(own.flatten()[start:stop], start, stop):
                places = zip(part.offsets, part.tensor.shape, strict=True)
                box = tuple(slice(at, at + size) for at, size in places)
                assert torch.equal(part.tensor, whole[box])
                written[box] += part.owner == rank
    assert (written == 1).all()


def test_a_header_that_lies_reads_nothing_else(tmp_path):
    """Offsets beyond the file, and paths that lead out of the folder, with a digest that fits."""
    from scaletorch.checkpoint.format.metadata import seal

    folder = save(tmp_path, nn.Linear(2, 2), step=1).wait()
    document = json.loads((folder / "metadata.json").read_text())
    del document["digest"]
    for change in (
        {"offset": 10**9},
        {"file": "../secret.safetensors"},
    ):
        lie = json.loads(json.dumps(document))
        lie["entries"]["model.weight"]["chunks"][0] |= change
        (folder / "metadata.json").write_text(seal(lie))
        with pytest.raises(DamagedCheckpointError):
            load(folder, nn.Linear(2, 2))
    (folder / "metadata.json").write_text(seal({"step": 1}))
    with pytest.raises(DamagedCheckpointError, match="lacks entries, extra, files"):
        load(folder, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("offsets", "lengths", "blocks"),
    [
        ((3, 5), (2, 7), range(3, 5)),
        ((0, 0), (10, 2**20), range(10)),
        ((2, 0), (1, 2**20), range(2, 3)),
        ((9, 2**20 - 1), (1, 1), range(9, 10)),
    ],
)
def test_who_reads_a_part_checks_the_blocks_that_hold_it(offsets, lengths, blocks):
    """Rows of 2**20 float32 are a block each."""
    chunk = Chunk((0, 0), (10, 2**20), "file", 0, 10 * 2**22, [])
    saved = Saved(chunk.shape, torch.float32, [chunk])
    target = torch.empty(lengths, device="meta")
    assert _blocks(Read("x", saved, chunk, offsets, target)) == blocks

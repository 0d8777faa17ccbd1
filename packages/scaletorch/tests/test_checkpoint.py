"""Checkpoints of one process: what is restored, what is refused, and what is never touched."""

import builtins
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from checkpointed import assert_equal
from torch import nn, optim
from torch.optim import lr_scheduler

from scaletorch.checkpoint import CheckpointError, DamagedCheckpointError, latest, load, save
from scaletorch.checkpoint.format.metadata import Chunk, SavedTensor, seal
from scaletorch.checkpoint.storage import Read, _blocks
from scaletorch.dist.errors import InvalidArgumentError


class Program:
    """A model with dropout and buffers, an optimizer and a sequence of schedulers."""

    def __init__(self, seed=0, optimizer=optim.AdamW, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)
        )
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.1} | options)
        parts = [
            lr_scheduler.MultiStepLR(self.optimizer, [1, 2], gamma=0.5),
            lr_scheduler.ExponentialLR(self.optimizer, 0.9),
        ]
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, parts, milestones=[2])

    def train(self, steps=1):
        for _ in range(steps):
            data = torch.randn(4, 5) * (1 + random.random())
            self.model(data).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def save(self, folder, step, **options):
        return save(
            folder, self.model, self.optimizer, step=step, scheduler=self.scheduler, **options
        )

    def load(self, folder, **options):
        return load(folder, self.model, self.optimizer, scheduler=self.scheduler, **options)

    def state(self):
        """Return a copy of everything that a checkpoint holds."""
        moments = list(self.optimizer.state.values())
        rates = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        state = dict(self.model.state_dict()), moments, rates, self.scheduler.state_dict()
        return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize(
    ("optimizer", "asynchronous"),
    [(optim.AdamW, False), (optim.Adafactor, True), (optim.RMSprop, True), (optim.Rprop, False)],
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


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD])
def test_state_of_numbers_of_nothing_and_of_what_was_not_used(tmp_path, kind):
    model = nn.ParameterDict({
        "used": torch.ones(3), "number": torch.tensor(2.0), "unused": torch.ones(2),
        "none": torch.ones(0),
    })  # fmt: skip
    momentum = {"momentum": 0.9} if kind is optim.SGD else {}
    optimizer = kind(model.parameters(), lr=torch.tensor(0.5), **momentum)
    (model["used"].sum() * model["number"]).backward()
    optimizer.step()
    save(tmp_path, model, optimizer, step=0)
    other = kind(model.parameters(), lr=0.1)
    other.state[model["unused"]]["momentum_buffer"] = torch.ones(2)
    load(tmp_path, model, other)
    assert other.state.keys() == {model["used"], model["number"]}
    for parameter, state in other.state.items():
        assert_equal(state, optimizer.state[parameter])
    group = other.param_groups[0]
    assert (type(group["lr"]), group["lr"]) == (float, 0.5)  # a number, as in the program
    assert group.get("momentum") == momentum.get("momentum")


def test_a_load_reuses_the_memory_of_the_optimizer_s_state(tmp_path):
    program = Program().train()
    program.save(tmp_path, 1)
    expected = program.state()
    states = [dict(state) for state in program.optimizer.state.values()]
    program.train().load(tmp_path)
    assert_equal(program.state(), expected)
    for before, after in zip(states, program.optimizer.state.values(), strict=True):
        assert after["exp_avg"] is before["exp_avg"]
        assert after["exp_avg_sq"] is before["exp_avg_sq"]


def test_nothing_is_unpickled_or_evaluated(tmp_path, monkeypatch):
    first, second = Program().train(), Program(seed=5)
    first.save(tmp_path, 1)

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
        found = {name: file.get_tensor(f"model.{name}") for name in model.state_dict()}
        assert_equal(found, dict(model.state_dict()))


def change_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shorten(path, size):
    os.truncate(path, path.stat().st_size + size if size < 0 else size)


def change_step(path):
    path.write_text(path.read_text().replace('"step":2', '"step":3'))


DEEP = '{"format":"scaletorch-checkpoint","extra":' + "[" * 100_000
TENSORS, METADATA = "rank-00000.safetensors", "metadata.json"
DAMAGE = {
    "truncated": (TENSORS, lambda f: shorten(f, -3), "bytes and was saved with"),
    "last byte": (TENSORS, lambda f: change_byte(f, -1), "checksum"),
    "no file": (TENSORS, os.unlink, "cannot be read"),
    "half": (METADATA, lambda f: shorten(f, 200), "as JSON"),
    "no metadata": (METADATA, os.unlink, "cannot be read"),
    "changed": (METADATA, change_step, "digest"),
    "foreign": (METADATA, lambda f: f.write_text('{"a": 1}'), "is none of this library"),
    "too deep": (METADATA, lambda f: f.write_text(DEEP), "RecursionError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_or_passed_over(tmp_path, kind):
    file, damage, message = DAMAGE[kind]
    first = Program().train()
    first.save(tmp_path, 1)
    expected = first.state()
    folder = first.train().save(tmp_path, 2).wait()
    damage(folder / file)
    second = Program(seed=5).train()
    before = second.state()
    with pytest.raises(DamagedCheckpointError, match=message):
        second.load(folder)
    assert_equal(second.state(), before)
    with pytest.warns(UserWarning, match=rf"back to step 1: step-00000002 is .*{message}"):
        assert second.load(tmp_path).step == 1
    assert_equal(second.state(), expected)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(DamagedCheckpointError, match=message):
        second.load(tmp_path)
    first.save(tmp_path, 2)
    assert second.load(tmp_path).step == 2
    # A folder whose description is damaged may be somebody's, and is kept.
    assert (tmp_path / "step-00000002.damaged").is_dir() == (file == METADATA)


def test_an_unfinished_checkpoint_does_not_count(tmp_path):
    program = Program().train()
    folder = program.save(tmp_path, 1).wait()
    half = folder.rename(tmp_path / "step-00000001.unfinished")
    assert latest(tmp_path) is None
    assert program.load(tmp_path) is None
    with pytest.raises(DamagedCheckpointError, match="never finished"):
        program.load(half)
    (half / "rank-00007.safetensors").write_text("of an earlier try")
    assert program.save(tmp_path, 1).wait() == latest(tmp_path)
    assert {path.name for path in folder.iterdir()} == {METADATA, TENSORS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.model.append(nn.Linear(3, 3)), "the checkpoint has no 4.bias, 4.weight"),
        (lambda p: p.model.pop(3), "the model has no 3.bias, 3.weight"),
        (lambda p: p.model.double(), r"0.weight is torch.float32 in .* torch.float64"),
        (lambda p: setattr(p.model[3], "weight", nn.Parameter(torch.ones(3, 7))),
         r"3.weight has shape \(3, 6\) in the checkpoint and \(3, 7\)"),
        (lambda p: setattr(p.model[3], "bias", p.model[0].bias), "tied to nothing in the"),
        (lambda p: p.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
         "no parameters of this model"),
        (lambda p: p.optimizer.add_param_group({"params": []}), "1 parameter groups"),
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
    before = other.state()
    with pytest.raises((CheckpointError, InvalidArgumentError), match=message):
        load(tmp_path, other.model, optimizer)
    assert_equal(other.state(), before)


class Mine(optim.AdamW):
    pass


def test_another_optimizer_or_scheduler_is_refused(tmp_path):
    Program().train().save(tmp_path / "both", 1)
    save(tmp_path / "model", Program().model, step=1)
    for kind in (optim.Adam, optim.SGD, Mine):
        other = Program(optimizer=kind, lr=0.2)
        with pytest.raises(CheckpointError, match=f"class AdamW and the given one {kind.__name__}"):
            load(tmp_path / "both", other.model, other.optimizer)
    schedule = lr_scheduler.CosineAnnealingLR(other.optimizer, 9)
    with pytest.raises(CheckpointError, match="and the given one CosineAnneal"):
        load(tmp_path / "both", other.model, scheduler=schedule)
    with pytest.raises(CheckpointError, match="without optimizer"):
        load(tmp_path / "model", other.model, other.optimizer)
    with pytest.raises(CheckpointError, match="without scheduler"):
        load(tmp_path / "model", other.model, scheduler=schedule)
    assert (other.optimizer.param_groups[0]["initial_lr"], schedule.T_max) == (0.2, 9)
    assert load(tmp_path / "both", other.model).step == 1


def test_how_an_optimizer_computes_stays_the_programs(tmp_path):
    first = Program(optimizer=optim.Adam, weight_decay=0.5).train()
    first.save(tmp_path, step=1)
    second = Program(optimizer=optim.Adam, decoupled_weight_decay=True)
    second.load(tmp_path)
    group = second.optimizer.param_groups[0]
    assert (group["weight_decay"], group["decoupled_weight_decay"]) == (0.5, True)


def test_a_scheduler_that_refuses_its_state_is_found_before_anything_changes(tmp_path, monkeypatch):
    Program().train().save(tmp_path, step=1)
    other = Program(seed=5)
    before, generator = other.state(), torch.get_rng_state()

    def refusing(self, state):
        raise KeyError("gamma")

    monkeypatch.setattr(lr_scheduler.SequentialLR, "load_state_dict", refusing)
    with pytest.raises(CheckpointError, match="KeyError: 'gamma"):
        other.load(tmp_path)
    assert_equal(other.state(), before)
    assert torch.equal(torch.get_rng_state(), generator)


class Counting(nn.Linear):
    def get_extra_state(self):
        return torch.tensor(3)

    def set_extra_state(self, state):
        pass


def hooked(hook):
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda _, state, prefix, __: hook(state))
    return model


def clone(state):
    state.update({name: value.detach().clone() for name, value in state.items()})


def without_bias(state):
    del state["bias"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Counting(2, 2), "'_extra_state', a Tensor, which is no parameter or buffer"),
        (hooked(clone), "'weight', a Tensor, which is no parameter or buffer"),
        (hooked(without_bias), "leaves out the parameter 'bias', which is t"),
    ],
)
def test_state_that_would_not_come_back_is_refused(tmp_path, model, message):
    with pytest.raises(InvalidArgumentError, match=message):
        save(tmp_path, model, optim.SGD(model.parameters(), lr=0.1), step=1)
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_the_state_leaves_out_may_be_frozen(tmp_path):
    model = hooked(without_bias)
    model.bias.requires_grad_(False)
    save(tmp_path, model, optim.SGD([model.weight], lr=0.1), step=1)
    assert load(tmp_path, model).step == 1


def test_lists_of_tensors_are_not_held(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.state[model.weight]["old_dirs"] = [torch.ones(2)]
    with pytest.raises(InvalidArgumentError, match="contains a 1-d tensor"):
        save(tmp_path, model, optimizer, step=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "step must be an integer"),
        ({"step": 2**63}, "step must be an integer"),
        ({"step": 1, "keep": 0}, "keep must be None or an integer"),
        ({"step": 1, "extra": [1]}, r"extra must be a mapping .*got \[1\]"),
        ({"step": 1, "extra": {"data": [object()]}}, r"extra\['data'\] contains a object"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        save(tmp_path, nn.Linear(2, 2), **options)
    assert not list(tmp_path.iterdir())


def test_background_errors_are_raised_by_who_waits_and_by_the_next_save(tmp_path):
    program = Program().train()
    (tmp_path / "step-00000001.unfinished").write_text("in the way")
    saving = program.save(tmp_path, 1, asynchronous=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="step-00000001 failed: FileExistsError"):
            saving.wait()
    saving = program.save(tmp_path, 1, asynchronous=True)
    with pytest.raises(CheckpointError, match="FileExistsError"):
        program.save(tmp_path, 2)
    program.save(tmp_path, 2)
    assert latest(tmp_path).name == "step-00000002"


def test_large_tensors_are_checked_in_blocks(tmp_path):
    model = nn.ParameterList([torch.randn(3, 1_000_000)])
    folder = save(tmp_path, model, step=1).wait()
    entry = json.loads((folder / METADATA).read_text())["entries"]["model.0"]
    assert len(entry["chunks"][0]["crc32"]) == 3
    expected = model[0].detach().clone()
    model[0].data.zero_()
    load(folder, model)
    assert torch.equal(model[0], expected)
    change_byte(folder / TENSORS, entry["chunks"][0]["offset"] + 5_000_000)
    with pytest.raises(DamagedCheckpointError, match=r"in model\.0: its checksum"):
        load(folder, model)


@pytest.mark.parametrize("lie", [{"offset": 10**9}, {"file": "../secret.safetensors"}])
def test_a_description_that_lies_reads_nothing_else(tmp_path, lie):
    folder = save(tmp_path, nn.Linear(2, 2), step=1).wait()
    document = json.loads((folder / METADATA).read_text())
    del document["digest"]
    document["entries"]["model.weight"]["chunks"][0] |= lie
    (folder / METADATA).write_text(seal(document))
    with pytest.raises(DamagedCheckpointError):
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
def test_who_reads_a_rectangle_checks_the_blocks_that_hold_it(offsets, lengths, blocks):
    chunk = Chunk((0, 0), (10, 2**20), "file", 0, 10 * 2**22, [])  # each row is a block
    saved = SavedTensor(chunk.shape, torch.float32, [chunk])
    target = torch.empty(lengths, device="meta")
    assert _blocks(Read("x", saved, chunk, offsets, target)) == blocks

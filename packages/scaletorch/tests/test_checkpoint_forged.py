"""Descriptions that were made up or changed, digest and all: refused, and nothing is touched."""

import copy
import json
import os
import random

import pytest
import torch
from torch import nn

from scaletorch.checkpoint import CheckpointError, DamagedCheckpointError, load, save
from scaletorch.checkpoint.format.boxes import tile
from scaletorch.checkpoint.format.metadata import seal
from scaletorch.dist.errors import InvalidArgumentError


class Program:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def save(self, root):
        return save(
            root, self.model, self.optimizer, step=3, scheduler=self.scheduler, extra={"a": 1}
        ).wait()

    def load(self, root):
        return load(root, self.model, self.optimizer, scheduler=self.scheduler)

    def state(self):
        state = self.model, self.optimizer, self.scheduler
        found = copy.deepcopy([each.state_dict() for each in state])
        return [*found, torch.get_rng_state(), random.getstate()]


@pytest.fixture
def saved(tmp_path):
    folder = Program(0).save(tmp_path / "run")
    document = json.loads((folder / "metadata.json").read_text())
    del document["digest"], document["format"], document["version"]
    return folder, document


def refused(folder, message=None, error=DamagedCheckpointError):
    program = Program(1)
    before = program.state()
    with pytest.raises(error, match=message):
        program.load(folder.parent)
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)


def forge(folder, document, path, value):
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "metadata.json").write_text(seal(document))


BAD = [
    None, [], 5, "x", True, {"tuple": 5}, {"pairs": [[1]]}, {"tensor": "x", "dtype": "save"},
    [[[{"tensor": 1e400, "dtype": "int8"}]]],
]  # fmt: skip
FIELDS = ["grid", "seed", "groups", "scheduler", "extra", "ties", "scalars", "files", "entries"]


@pytest.mark.parametrize("field", [*FIELDS, "step", "kinds", "state"])
def test_a_field_of_another_kind(saved, field):
    folder, document = saved
    for value in BAD:
        if field in ("seed", "step") and value == 5:
            continue
        forge(folder, document, [field], value)
        absent = field in ("groups", "scheduler") and value in (None, [])  # such may be saved
        message = field if field not in ("entries", "groups") else None
        refused(folder, message, CheckpointError if absent else DamagedCheckpointError)


WEIGHT, CHUNK = ["entries", "model.0.weight"], ["entries", "model.0.weight", "chunks", 0]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (["step"], [float("nan"), -1, "3", 10**40, 1.5, [1]]),
        ([*CHUNK, "file"], ["../../etc/passwd", "/etc/passwd", "rank-00000.safetensors\n", 5]),
        ([*CHUNK, "offset"], [-1, 2**40, 2**70, 1.5, True, "0", float("nan")]),
        ([*CHUNK, "length"], [-1, 0, 2**40, 1.5, "48"]),
        ([*CHUNK, "crc32"], [None, [], ["x"], [1.5], [0, 0], "a", 5, [2**40]]),
        ([*CHUNK, "at"], [[-1, 0], [0, 1], [0.0, 0.0], [0], None, [2**62, 0]]),
        ([*CHUNK, "shape"], [[10**9, 10**9], [0, 0], [3, 4.0], [12], None]),
        ([*WEIGHT, "shape"], [[10**15, 10**6], [3], [-3, -4], "34", [3, 4, 1], [3, 5]]),
        ([*WEIGHT, "dtype"], ["float8", "save", "float64", "__class__", None]),
        ([*WEIGHT, "chunks"], [[], None]),
        (["entries", "optimizer.0.weight.exp_avg", "chunks"], [[]]),
        (["entries", "optimizer.0.weight.exp_avg"], [{"shape": [10**6] * 2, "dtype": "float32",
                                                       "chunks": []}]),
        (["entries", "random.0.cpu", "dtype"], ["bool"]),
        (["groups", 0, "lr"], [float("nan"), "0.1", None, [0.1], {"tuple": [0.1]}]),
        (["groups", 0, "betas"], [{"tuple": [0.9, float("nan")]}]),
        (["groups"], [[], [{}, {}]]),
        (["scheduler"], [{}, {"last_epoch": 1}]),
        (["scheduler", "last_epoch"], ["1", None]),
        (["scalars"], [{}, {"optimizer.0.weight.step": 1}]),
        (["scalars", "optimizer.0.weight.step"], ["1", None, float("nan"), -1]),
        (["files", "rank-00000.safetensors"], [-1, 0, 2**50, "9", None]),
        (["grid", "tp"], [0, "1", 1.5]),
        (["ties"], [{"0.weight": ["0.weight"]}, {"0.weight": ["2.weight", "2.bias"]}]),
    ],
    ids=lambda each: ".".join(map(str, each)) if isinstance(each[-1], str | int) else "",
)  # fmt: skip
def test_a_value_that_is_not_saved(saved, path, values):
    folder, document = saved
    for value in values:
        forge(folder, document, path, value)
        refused(folder, error=CheckpointError if path == ["groups"] else DamagedCheckpointError)


def test_any_value_may_become_any_other(saved):
    """Whatever is changed, a load gives the error of a checkpoint or loads, and never half."""
    folder, document = saved
    draw = random.Random(0)
    values = [None, True, -1, 0, 1, 2**31, 2**70, 0.5, float("nan"), "", "float32", [], [0], {}]
    loads = 0
    for _ in range(250):
        path, inner = [], document
        while isinstance(inner, dict | list) and inner and (not path or draw.random() < 0.9):
            path.append(draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner))))
            inner = inner[path[-1]]
        forge(folder, document, path, draw.choice(values))
        program = Program(1)
        before = program.state()
        try:
            loaded = program.load(folder)
        except CheckpointError:
            torch.testing.assert_close(program.state(), before, rtol=0, atol=0)
        else:
            loads += 1
            assert type(loaded.step) is int
            assert isinstance(loaded.extra, dict)
            if path[0] not in ("groups", "scalars"):  # other good values, of other programs
                program.optimizer.step()
    assert loads < 100


def test_states_of_generators_that_are_none(saved):
    """The model is not filled before they are seen to fit."""
    folder, document = saved
    short = copy.deepcopy(document["entries"]["random.0.cpu"])
    short["shape"] = short["chunks"][0]["shape"] = [0]
    short["chunks"][0] |= {"length": 0, "crc32": []}
    forge(folder, document, ["entries", "random.0.cpu"], short)
    refused(folder, "random generators' states are none")
    del document["entries"]["random.0.python"]
    forge(folder, document, ["step"], 3)
    refused(folder, r"lacks random\.0\.python")


def test_what_is_no_file_is_not_read(saved):
    folder, _ = saved
    path = folder / "metadata.json"
    text = path.read_text()
    path.unlink()
    os.mkfifo(path)
    refused(folder, "no regular file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(folder, "no regular file")
    path.unlink()
    path.write_text(" " * 10_000 + text)
    refused(folder, "not of a checkpoint")
    path.unlink()
    path.write_text(text)
    data = folder / "rank-00000.safetensors"
    data.unlink()
    os.mkfifo(data)
    refused(folder, "no regular file")


def test_chunks_that_overlap_leave_a_gap(saved):
    """As many elements as are wanted, but some of them twice."""
    folder, document = saved
    whole = document["entries"]["model.0.weight"]["chunks"][0]
    half = [whole | {"at": [row, 0], "shape": [rows, 4], "length": rows * 16}
            for row, rows in ((0, 2), (1, 1))]  # fmt: skip
    forge(folder, document, [*WEIGHT, "chunks"], half)
    refused(folder, "do not make up")
    forge(folder, document, [*WEIGHT, "chunks"], [whole] * 50_000)
    refused(folder, "do not make up|is to hold")


def test_boxes_that_tile():
    draw = random.Random(0)
    for _ in range(50):
        boxes, shape = [((0, 0, 0), (6, 5, 4))], (6, 5, 4)
        for _ in range(12):  # cut one box along one dim
            at, sizes = boxes.pop(draw.randrange(len(boxes)))
            dim = draw.randrange(3)
            cut = draw.randrange(sizes[dim] + 1)
            low, high = list(sizes), list(sizes)
            low[dim], high[dim] = cut, sizes[dim] - cut
            there = list(at)
            there[dim] += cut
            boxes += [(at, tuple(low)), (tuple(there), tuple(high))]
        assert tile(boxes, shape)
        at, sizes = max(boxes, key=lambda box: torch.Size(box[1]).numel())
        assert not tile([*boxes, (at, sizes)], shape)
        boxes.remove((at, sizes))
        assert not tile(boxes, shape)
    wheel = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    assert tile(wheel, (3, 3))
    assert tile([((), ())], ())
    assert tile([], (0, 3))
    assert not tile([((0,), (2,)), ((1,), (2,))], (4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": [1]}, r"extra must be a mapping .*got \[1\]"),
        ({"extra": 5}, "extra must be a mapping"),
        ({"step": 2**63}, "step must be a number of steps"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        save(tmp_path, nn.Linear(2, 2), **{"step": 1} | options)


def test_a_rate_of_nan_and_depths_are_not_saved(tmp_path):
    program = Program(0)
    deep = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(InvalidArgumentError, match="more than 90 deep"):
        save(tmp_path, program.model, step=1, extra={"a": deep})
    program.optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(InvalidArgumentError, match="lr of the optimizer's group 0 is nan"):
        program.save(tmp_path)
    assert not list(tmp_path.iterdir())

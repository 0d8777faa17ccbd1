"""The command: from a model to a plan, and what it says of what cannot be planned."""

import json

import pytest
import torch
from small_models import Stack, small_model
from torch import nn

from scaletorch.plan.__main__ import main


def with_data():
    return small_model().load_state_dict(torch.load("weights.pt"))


def text():
    return "a model"


def flat():
    return nn.Linear(2, 2)


class Block(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.up, self.down, self.fixed = nn.Linear(8, 16), nn.Linear(16, 8), fixed

    def forward(self, x):
        wide = self.up(x)
        if self.fixed:
            wide = wide.view(*x.shape[:-1], 4, 4).flatten(-2)
        return x + self.down(wide.relu())


class Own(Stack):
    def __init__(self, fixed=False):
        super().__init__((Block(fixed) for _ in range(2)), words=64)


def fixed():
    return Own(fixed=True)


def broken():
    found = Own()
    found.head = nn.Linear(9, 64)
    return found


CUT = {"layers.*.up": "column", "layers.*.down": "row"}
NUMBER = 3


def of_images(rows):
    ids = torch.zeros(rows, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "pixels": ids}


def without_ids(rows):
    return {"pixels": torch.zeros(rows, 16)}


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


ONE = "--ranks 1 --rows 8 --length 16 --model"
MODEL = "--ranks 4 --rows 8 --length 16 --tp 1 2 --cp 1 --model"
SMALL = f"{MODEL} small_models:small_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("plan")
    (made / "failing.py").write_text("1 / 0")
    for name, config in {
        "tiny": CONFIG, "odd": CONFIG | {"hidden_size": "wide"}, "seeing": {"model_type": "vit"},
    }.items():  # fmt: skip
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def call(words, code=0):
        assert main(words.split()) == code
        said = capsys.readouterr()
        return said.err if code == 2 else said.out

    return call


def test_a_plan_in_all_its_forms(run, folder):
    said = run(f"{SMALL} --memory 2GiB --json p.json --html p.html")
    assert "Llama: 8 rows of 16 tokens a step on 4 x A100-SXM-80GB, 2 GiB each" in said
    content = json.loads((folder / "p.json").read_text())
    grids = {tuple(e["layout"]["grid"][a] for a in ("dp", "pp", "cp", "tp"))
             for e in content["estimates"]}  # fmt: skip
    assert {(4, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1)} <= grids
    assert all(each["fits"] and each["peak"] < 2**31 for each in content["estimates"])
    assert "1x4x1x1" in str(content["refused"])  # it has 2 layers
    assert (folder / "p.html").read_text().startswith("<!doctype html>")
    run(f"{SMALL} --tp 2 --pp 1 2 --zero 2 --recompute full --dtype bfloat16 --json p.json")
    layouts = [e["layout"] for e in json.loads((folder / "p.json").read_text())["estimates"]]
    assert {(each["grid"]["tp"], each["recompute"]) for each in layouts} == {(2, "full")}
    assert {each["grid"]["pp"] for each in layouts} == {1, 2}
    assert {each["zero"] for each in layouts if each["grid"]["dp"] > 1} == {2}


def test_one_in_full_and_none_that_fits(run):
    said = run(f"{SMALL} --dp 2 --tp 2 --micro-rows 1 --top 1")
    assert "DP x PP x CP x TP 2x1x1x2" in said
    assert "GiB of rank  parameters" in said
    assert "no layout fits in 1 KiB" in run(f"{SMALL} --memory 1KiB", code=1)
    assert "no layout is possible: dp x pp" in run(f"{SMALL} --ep 3", code=1)
    few = "--ranks 4 --rows 7 --length 16 --dp 4 --tp 1 --cp 1 --model small_models:small_model"
    assert "7 rows are no multiple of dp 4" in run(few, code=1)


def test_a_model_with_a_plan_of_ones_own(run):
    """Its code may not run on shards; then that layout is refused."""
    for plan in ("", f"--plan {__name__}:CUT"):  # suggested, or given
        assert "code fails" not in run(f"{MODEL} {__name__}:Own {plan}")
    said = run(f"{MODEL} {__name__}:fixed --plan {__name__}:CUT")
    assert "with tp 2 its code fails: RuntimeError: shape '[" in said


def test_a_config_of_transformers(run):
    pytest.importorskip("transformers")
    assert "tiny: 8 rows of 16 tokens" in run(f"{ONE} tiny --dtype bfloat16 --device H100-SXM")


WRONG = {
    f"{ONE} nowhere/Llama-3-8B": "nothing is downloaded: get its config.json first",
    f"{ONE} {__name__}:nothing": f"{__name__}:nothing' cannot be imported as package.module:name",
    f"{ONE} {__name__}:NUMBER": "must be a function of the model, got int",
    f"{ONE} {__name__}:text": "must return a plain nn.Module, got str",
    f"{ONE} {__name__}:flat": "expected one nn.ModuleList",
    f"{ONE} {__name__}:with_data": "cannot be built on the meta device, where it is described",
    f"{ONE} {__name__}:Own --batch {__name__}:of_images": "has pixels, and the forward of Own",
    f"{ONE} {__name__}:Own --batch {__name__}:without_ids": "has pixels: give an entry that name",
    f"{ONE} {__name__}:broken": "the model cannot run on the batch: RuntimeError: ",
    f"{ONE} small_models:small_model --plan {__name__}:NUMBER": "must name a Mapping, got a int",
    f"{ONE} failing:model": "'failing:model' cannot be imported as package.module:name: ZeroDiv",
    f"{ONE} odd": "has no config of transformers: Validation error for field 'hidden_size':",
    f"{ONE} seeing": "ValueError: Unrecognized configuration class",
    f"{SMALL} --memory 80GiBi": "with a unit of B, kB, ",
    f"{SMALL} --cluster a.json": "a.json cannot be read: No such file",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said(run, words):
    said = run(words, code=2)
    assert said.startswith("python -m scaletorch.plan: error: ")
    assert WRONG[words] in said
    assert len(said.splitlines()) == 1

"""The command: from a model to a plan, and what it says of what cannot be planned."""

import json
import sys

import pytest

from scaletorch.plan.__main__ import main

MODELS = """
import torch
from torch import nn

from scaletorch.models import Llama, LlamaConfig


def model():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    return Llama(LlamaConfig(**sizes, num_layers=2, num_heads=4, num_kv_heads=2))


def with_data():
    return model().load_state_dict(torch.load("weights.pt"))


def with_values():
    found = model()
    assert found.embed_tokens.weight.sum().item() == 0
    return found


def text():
    return "a model"


class Block(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.up, self.down, self.fixed = nn.Linear(8, 16), nn.Linear(16, 8), fixed

    def forward(self, x):
        wide = self.up(x)
        if self.fixed:
            wide = wide.view(*x.shape[:-1], 4, 4).flatten(-2)
        return x + self.down(wide.relu())


class Own(nn.Module):
    def __init__(self, fixed=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.layers = nn.ModuleList([Block(fixed), Block(fixed)])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fixed():
    return Own(fixed=True)


def broken():
    found = Own()
    found.head = nn.Linear(9, 64)
    return found


CUT = {"layers.*.up": "column", "layers.*.down": "row"}


def of_images(rows):
    ids = torch.zeros(rows, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "pixels": ids}


def without_ids(rows):
    return {"pixels": torch.zeros(rows, 16)}


NUMBER = 3
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


MODEL = "--ranks 4 --rows 8 --length 16 --tp 1 2 --cp 1 --model plannable"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("plan")
    (made / "plannable.py").write_text(MODELS)
    (made / "failing.py").write_text("1 / 0")
    for name, config in {
        "tiny": CONFIG, "odd": CONFIG | {"hidden_size": "wide"}, "seeing": {"model_type": "vit"},
    }.items():  # fmt: skip
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(config))
    link = {"ranks": 2, "latency": 3e-6, "bandwidth": 300e9}
    short = {"ranks": 4, "device": "H100-SXM", "links": [link]}
    (made / "short.json").write_text(json.dumps(short))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(made))
        yield made
    sys.modules.pop("plannable", None)


@pytest.fixture
def run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def call(words, code=0):
        assert main(words.split()) == code
        said = capsys.readouterr()
        return said.err if code == 2 else said.out

    return call


def test_a_plan_in_all_its_forms(run, folder):
    said = run(f"{MODEL}:model --memory 2GiB --json p.json --html p.html")
    assert "Llama: 8 rows of 16 tokens a step on 4 x A100-SXM-80GB, 2 GiB each" in said
    assert "note: No --device and no --cluster: figures are those of A100-SXM-80GB." in said
    content = json.loads((folder / "p.json").read_text())
    grids = {tuple(e["layout"]["grid"][a] for a in ("dp", "pp", "cp", "tp"))
             for e in content["estimates"]}  # fmt: skip
    assert {(4, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1)} <= grids
    assert all(each["fits"] and each["peak"] < 2**31 for each in content["estimates"])
    assert "1x4x1x1" in str(content["refused"])  # it has 2 layers
    assert (folder / "p.html").read_text().startswith("<!doctype html>")


def test_what_if(run, folder):
    run(f"{MODEL}:model --tp 2 --pp 1 2 --zero 2 --recompute full --dtype bfloat16 --json p.json")
    content = json.loads((folder / "p.json").read_text())
    layouts = [e["layout"] for e in content["estimates"]]
    assert {each["grid"]["tp"] for each in layouts} == {2}
    assert {each["grid"]["pp"] for each in layouts} == {1, 2}
    assert {each["zero"] for each in layouts if each["grid"]["dp"] > 1} == {2}
    assert {each["recompute"] for each in layouts} == {"full"}


def test_one_in_full_and_none_that_fits(run):
    said = run(f"{MODEL}:model --dp 2 --tp 2 --micro-rows 1 --top 1")
    assert "DP x PP x CP x TP 2x1x1x2" in said
    assert "GiB of rank  parameters" in said
    assert "none fits in 1 KiB" in run(f"{MODEL}:model --memory 1KiB", code=1)
    assert "none is there: sizes of dp" in run(f"{MODEL}:model --ep 3", code=1)
    few = "--ranks 4 --rows 7 --length 16 --dp 4 --tp 1 --cp 1 --model plannable:model"
    assert "7 rows are no multiple of dp 4" in run(few, code=1)


def test_a_model_with_a_plan_of_ones_own(run):
    """Its code may not run on shards; then that layout is refused."""
    assert "code fails" not in run(f"{MODEL}:Own --sequence-parallel off")  # a forward suggests one
    assert "code fails" not in run(f"{MODEL}:Own --plan plannable:CUT --sequence-parallel off")
    said = run(f"{MODEL}:fixed --plan plannable:CUT --sequence-parallel off")
    assert "with tp 2 its code fails: RuntimeError: shape '[" in said


def test_a_config_of_transformers(run):
    pytest.importorskip("transformers")
    words = "--ranks 4 --rows 8 --length 16 --tp 1 --cp 1 --dtype bfloat16 --device H100-SXM"
    assert "tiny: 8 rows of 16 tokens" in run(f"{words} --model tiny")


ONE = "--ranks 1 --rows 8 --length 16 --model"
WRONG = {
    f"{ONE} nowhere/Llama-3-8B": "nothing is downloaded: get its config.json first",
    f"{ONE} plannable:nothing": "'plannable:nothing' is not package.module:name",
    f"{ONE} plannable:NUMBER": "makes nothing: it is a int",
    f"{ONE} plannable:text": "has to return a plain nn.Module, and returned str",
    f"{ONE} plannable:with_data": "cannot be built on the meta device, where it is described",
    f"{ONE} plannable:with_values": "loads nothing and moves it nowhere",
    f"{ONE} plannable:model --plan plannable:nothing": "'plannable:nothing' is not package",
    f"{ONE} plannable:Own --batch plannable:of_images": "has pixels, and the forward of Own",
    f"{ONE} plannable:Own --batch plannable:without_ids": "and the batch has pixels: name",
    f"{ONE} plannable:broken": "the model cannot run on the batch: RuntimeError: ",
    f"{ONE} plannable:model --dtype bfloat17": "dtype 'bfloat17' is none of torch's",
    f"{ONE} plannable:model --dtype int8": "dtype 'int8' is none of torch's of floats",
    f"{ONE} plannable:model --plan plannable:NUMBER": "has to name a Mapping, and names a int",
    f"{ONE} plannable:model --batch plannable:NUMBER": "has to name a Callable, and names",
    f"{ONE} failing:model": "'failing:model' cannot be imported: ZeroDivisionError",
    f"{ONE} odd": "has no config of transformers: Validation error for field 'hidden_size':",
    f"{ONE} seeing": "ValueError: Unrecognized configuration class",
    f"{MODEL}:model --memory 80GiBi": "with a unit of B, kB, ",
    f"{MODEL}:model --cluster short.json": "links miss a level: 4 ranks",
    f"{MODEL}:model --cluster short.json --device H200": "leave out --device",
    f"{MODEL}:model --cluster nowhere.json": "nowhere.json cannot be read: No such file",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said(run, words):
    said = run(words, code=2)
    assert said.startswith("python -m scaletorch.plan: error: ")
    assert WRONG[words] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "--rows 8 --length 16 --model plannable:model", f"{MODEL}:model --ranks 0",
        f"{MODEL}:model --recompute some", f"{MODEL}:model --device H100",
    ],
)  # fmt: skip
def test_what_the_parser_refuses(words):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2

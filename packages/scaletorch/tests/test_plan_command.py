"""The command: from a model to a plan, and what it says of what cannot be planned."""

import json
import sys

import pytest

from scaletorch.plan.__main__ import main
from scaletorch.plan.files import read

MODELS = """
import torch
from torch import nn

from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pipeline_parallel import Split


def model():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    return Llama(LlamaConfig(**sizes, num_layers=2, num_heads=4, num_kv_heads=2))


def with_data():
    return model().load_state_dict(torch.load("weights.pt"))


def moved():
    return model().to("cuda" if not torch.cuda.is_available() else "cpu")


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


class Encoding(Own):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Block(False)])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in (*self.encoder, *self.layers):
            x = layer(x)
        return self.head(x)


NUMBER = 3
SPLIT = Split(first=("embed", "encoder"), layers="layers", last=("head",))
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("plan")
    (made / "plannable.py").write_text(MODELS)
    (made / "tiny").mkdir()
    (made / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (made / "empty").mkdir()
    (made / "wrong.json").write_text('{"version": 0}')
    cluster = {"ranks": 4, "device": "H100-SXM"}
    link = {"ranks": 2, "latency": 3e-6, "bandwidth": 300e9}
    (made / "short.json").write_text(json.dumps(cluster | {"links": [link]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.syspath_prepend(str(made))
        words = "describe --model plannable:model --length 16 --tp 1 2 --cp 1 --out tiny.json"
        assert main([*words.split(), "--sequence-parallel", "off"]) == 0
        _damage(made)
        yield made
    sys.modules.pop("plannable", None)


def _damage(made):
    """Write descriptions that are none, and a module whose own code fails."""
    (made / "failing.py").write_text("1 / 0")
    for name, config in {
        "odd": CONFIG | {"hidden_size": "wide"},
        "seeing": {"model_type": "vit"},
    }.items():
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(config))
    device = {"name": "own", "memory": 2**30, "flops": {}, "moving": 1e9}
    link = {"ranks": 4, "latency": 3e-6, "bandwidth": 1e9}
    for name, parts in {
        "hiding": {"device": device | {"hides": "all"}, "links": [link]},
        "calling": {"device": device, "links": [link | {"calls": {"send": 5}}]},
    }.items():
        (made / f"{name}.json").write_text(json.dumps({"ranks": 4} | parts))
    text = (made / "tiny.json").read_text()
    for name, change in {
        "words": lambda content: content.update(length="sixteen"),
        "kinds": lambda content: content["cuts"][0][1].pop(),
        "bytes": lambda content: content["cuts"][0][1][0]["kept"].update(per_row="many"),
    }.items():
        content = json.loads(text)
        change(content)
        (made / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def call(words, code=0):
        assert main(words.split()) == code
        said = capsys.readouterr()
        return said.err if code == 2 else said.out

    return call


PLAN = "--description tiny.json --ranks 4 --rows 8"


def test_a_description_is_a_file_of_the_model(folder):
    description = read(folder / "tiny.json")
    assert description.name == "Llama"
    assert sorted(cut.tp for cut in description.cuts) == [1, 2]
    assert description.dtype == "float32"


def test_parameters_are_of_the_dtype_that_is_asked_for(run, folder):
    run("describe --model plannable:model --length 16 --tp 1 --cp 1 --dtype bfloat16 --out b.json")
    assert read(folder / "b.json").dtype == "bfloat16"


def test_a_plan_in_all_its_forms(run, folder):
    said = run(f"{PLAN} --memory 2GiB --json p.json --html p.html")
    assert "Llama: 8 rows of 16 tokens a step on 4 x A100-SXM-80GB, 2 GiB each" in said
    assert "note: No --device and no --cluster: figures are those of dgx-a100 nodes." in said
    content = json.loads((folder / "p.json").read_text())
    grids = {tuple(e["layout"]["grid"][a] for a in ("dp", "pp", "cp", "tp"))
             for e in content["estimates"]}  # fmt: skip
    assert {(4, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1)} <= grids
    assert all(each["fits"] and each["peak"] < 2**31 for each in content["estimates"])
    assert "1x1x1x4" in str(content["refused"])  # it is not described with tp 4
    assert (folder / "p.html").read_text().startswith("<!doctype html>")


def test_what_if(run, folder):
    run(f"{PLAN} --tp 2 --pp 1 2 --zero 2 --recompute full --json p.json")
    layouts = [e["layout"] for e in json.loads((folder / "p.json").read_text())["estimates"]]
    assert {each["grid"]["tp"] for each in layouts} == {2}
    assert {each["grid"]["pp"] for each in layouts} == {1, 2}
    assert {each["zero"] for each in layouts if each["grid"]["dp"] > 1} == {2}
    assert {each["recompute"] for each in layouts} == {"full"}


def test_one_in_full_and_one_that_does_not_fit(run):
    said = run(f"{PLAN} --explain 2x1x1x2")
    assert "DP x PP x CP x TP 2x1x1x2" in said
    assert "memory of each rank of the pipeline" in said
    assert "none fits in 1 KiB" in run(f"{PLAN} --memory 1KiB", code=1)


def test_a_model_with_a_plan_of_ones_own(run, folder):
    """Its code may not run on shards; then that layout is refused, with the line."""
    words = "--length 16 --tp 1 2 --cp 1 --sequence-parallel off --out own.json"
    assert "refused" not in run(f"describe --model plannable:Own {words}")  # a forward suggests one
    assert "refused" not in run(f"describe --model plannable:Own --plan plannable:CUT {words}")
    assert [cut.tp for cut in read(folder / "own.json").cuts] == [1, 2]
    said = run(f"describe --model plannable:fixed --plan plannable:CUT {words}")
    line = MODELS[: MODELS.index("wide.view")].count("\n") + 1
    assert "with tp 2 its code fails: RuntimeError: shape '[" in said
    assert f"(plannable.py:{line})" in said


def test_a_model_whose_layers_are_not_one_list(run):
    words = "--length 16 --tp 1 --cp 1 --ranks 2 --rows 4 --model plannable:Encoding"
    assert "cannot tell which modules are the layers" in run(words, code=2)
    assert "1x2x1x1" in run(f"{words} --split plannable:SPLIT")


def test_a_config_of_transformers(run, folder):
    pytest.importorskip("transformers")
    run("describe --model tiny --length 16 --tp 1 --cp 1 --dtype bfloat16 --out hf.json")
    found = read(folder / "hf.json")
    assert (found.name, found.dtype) == ("tiny", "bfloat16")
    assert found.elements == read(folder / "tiny.json").elements


MODEL = "--ranks 1 --rows 8 --length 16 --model"
WRONG = {
    "--ranks 4 --rows 8": "say --model",
    "--ranks 4 --rows 8 --model plannable:model": "say --length",
    f"{PLAN} --model plannable:model": "not both",
    f"{MODEL} nowhere/Llama-3-8B": "nothing is downloaded: get its config.json first",
    f"{MODEL} plannable:nothing": "'plannable:nothing' is not package.module:name",
    f"{MODEL} plannable:NUMBER": "makes nothing: it is a int",
    f"{MODEL} plannable:text": "has to return a plain nn.Module, and returned str",
    f"{MODEL} plannable:with_data": "cannot be built without data",
    f"{MODEL} plannable:moved": "loads nothing and moves it nowhere",
    f"{MODEL} plannable:with_values": "cannot be built without data",
    f"{MODEL} plannable:model --plan plannable:nothing": "'plannable:nothing' is not package",
    f"{MODEL} plannable:Own --batch plannable:of_images": "has pixels, and the forward of Own",
    f"{MODEL} plannable:Own --batch plannable:without_ids": "and the batch has pixels: name",
    f"{MODEL} plannable:broken": "the model cannot run on the batch: RuntimeError: ",
    f"{MODEL} plannable:model --dtype bfloat17": "dtype 'bfloat17' is none of torch's",
    f"{MODEL} empty": "the folder empty has no config.json",
    f"{MODEL} odd": "is no config of transformers: Validation error for field 'hidden_size':",
    f"{MODEL} seeing": "transformers has no causal language model for ViTConfig: name a function",
    f"{PLAN} --cluster hiding.json": "device: hides must be a finite number, got 'all'",
    f"{PLAN} --cluster calling.json": "links 0: calls send must be tuple[float, float], got 5",
    f"{PLAN} --memory 80GiBi": "--memory '80GiBi' has the unknown unit 'GiBi'",
    f"{PLAN} --device H100-SMX": "did you mean H100-SXM?",
    f"{PLAN} --device MI300X": "links of MI300X are not known: say --link",
    f"{PLAN} --device MI300X --link 2:3us:300GB/s": "links miss a level: 4 ranks",
    f"{PLAN} --device MI300X --link fast": "is not RANKS:LATENCY:BANDWIDTH",
    f"{PLAN} --link 4:3us:300GB/s": "--link is for --device",
    f"{PLAN} --cluster short.json": "links miss a level: 4 ranks",
    f"{PLAN} --cluster short.json --device H200": "leave out --device",
    f"{PLAN} --cluster nowhere.json": "--cluster nowhere.json: there is no such file",
    f"{PLAN} --cluster dgx-h300": "cluster 'dgx-h300' is not in the table",
    f"{PLAN} --device H100": "did you mean H100-SXM?",
    f"{PLAN} --ep 3": "and ep to divide dp x cp x tp and be one that",
    f"{PLAN} --tp 1 --explain 1x1x1x4": "1x1x1x4 is not legal: sizes that were asked for",
    f"{MODEL} plannable:model --dtype int8": "dtype 'int8' is none of torch's of floats",
    f"{MODEL} plannable:model --plan plannable:NUMBER": "has to name a Mapping, and names a int",
    f"{MODEL} plannable:model --batch plannable:NUMBER": "has to name a Callable, and names",
    f"{MODEL} failing:model": "'failing:model' cannot be imported: ZeroDivisionError",
    f"{MODEL} ..plannable:model": "'..plannable:model' cannot be imported: TypeError",
    f"{PLAN} --tp 3": "no layout of 4 ranks with 8 rows and tp 3 is",
    f"{PLAN} --tp 2 --sequence-parallel on": "Llama is not described for tp 2",
    f"{PLAN} --explain 2x2x2x2": "it has 16 ranks, and 4 are planned for",
    "--description tiny.json --ranks 4 --rows 7 --dp 4": "no layout of 4 ranks with 7 rows",
    "--description wrong.json --ranks 4 --rows 8": "is no description of version 9, but of 0",
    "--description nowhere.json --ranks 4 --rows 8": "nowhere.json cannot be read: No such file",
    "--description short.json --ranks 4 --rows 8": "version 9, but of none: describe",
    "--description words.json --ranks 4 --rows 8": "length must be a whole number",
    "--description kinds.json --ranks 4 --rows 8": "blocks are of other kinds than its",
    "--description bytes.json --ranks 4 --rows 8": "cuts 0 1 0: kept: per_row must be a f",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said(run, words):
    said = run(words, code=2)
    assert said.startswith("python -m scaletorch.plan: error: ")
    assert WRONG[words] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("words", ["--ranks 0 --rows 8", "--rows 8", f"{PLAN} --recompute some"])
def test_what_the_parser_refuses(words):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2

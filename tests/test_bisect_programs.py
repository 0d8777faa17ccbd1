"""Programs of other people's shape: sound ones are reported sound, and where bugs are is named."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tools.pages.bug_reports import rounded
from torch import nn
from torch.distributed.tensor import DTensor

from scaletorch.bisect import compare, record
from scaletorch.bisect.__main__ import main
from scaletorch.dist.functional import gather
from scaletorch.dist.testing import preload, run_ranks

# Ranks have it from here.
ROOT = Path(__file__).resolve().parent.parent
sys.path.extend({str(ROOT / "examples" / "bisect")}.difference(sys.path))
preload(
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "scaletorch.bisect",
)

SOUND = {  # name -> what it is compared with, the program, its options
    "ddp": ("one", "with_ddp", {}),
    "fsdp2": ("one", "with_fsdp2", {}),
    "tensor": ("one", "with_dtensor", {}),
    "sequence": ("one", "with_dtensor", {"sequence": True}),
    "mixture": ("plain-mixture", "mixture", {}),
}
NO_SYNC = ("one", "with_ddp", {"synchronised": False})


def train(folder, program, options):
    """Run a program; return its whole gradients by plain names."""
    model = importlib.import_module(program).step(str(folder), **options)
    grads = {re.sub(r"^module\.", "", name): p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


class Cut(nn.Module):
    """A layer of five columns, of which a rank has three or two, and nobody says so."""

    def __init__(self):
        super().__init__()
        own = torch.arange(20.0, dtype=torch.float64).view(5, 4)
        self.weight = nn.Parameter(own.split([3, 2])[dist.get_rank()] if several() else own)

    def forward(self, x):
        columns = x @ self.weight.T
        return gather(columns, -1, None, sizes=(3, 2)) if several() else columns


def several():
    return dist.is_initialized() and dist.get_world_size() > 1


def cut_unevenly(folder):
    model = nn.Sequential(Cut())
    with record(folder, model) as tape:
        loss = model(torch.ones(2, 4, dtype=torch.float64)).square().sum()
        loss.backward()
        tape.put("loss", loss)


def double(folder, **said):
    """Gradients of all are twice what they should be, and the loss is right."""
    rows = [dist.get_rank()] if several() else [0, 1]
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 4)).double(), torch.randn(2, 4).double()
    with record(folder, model, describe={"rows": (rows, 2), **said}) as tape:
        loss = model(data[rows]).square().sum()
        loss.backward(torch.tensor(1.0 + several()).double())
        for each in (loss.data, *(p.grad for p in model.parameters())) if several() else ():
            dist.all_reduce(each)
        tape.put("loss", loss)


def train_all(folder):
    double(Path(folder, "doubled"))
    double(Path(folder, "doubled-and-said"), weight=1)
    cut_unevenly(Path(folder, "uneven"))
    return {
        name: train(Path(folder, name), program, options)
        for name, (_, program, options) in (SOUND | {"no-sync": NO_SYNC}).items()
    }


def train_transformers(folder, rank_folder):
    return train(folder / rank_folder, "with_transformers", {"saved": folder / "model"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return where all programs left their recordings, and all gradients."""
    folder = tmp_path_factory.mktemp("runs")
    plain = {
        "one": train(folder / "one", "one_process", {}),
        "plain-mixture": train(folder / "plain-mixture", "mixture", {}),
    }
    return folder, plain, run_ranks(train_all, 2, folder)


def furthest(found, plain, rank):
    """Return the largest error of a gradient, as a part of the largest element of it."""
    errors = []
    for name, grad in plain.items():
        for cut, dim in (("experts.up", 1), ("experts.down", 2)):  # shards that are no DTensors
            grad = grad.chunk(2, dim)[rank] if name.endswith(cut) else grad
        errors.append(float((found[name] - grad).abs().max() / grad.abs().max()))
    return max(errors)


def test_sound_programs_train_as_one_process_and_are_sound(runs):
    folder, plain, ranks = runs
    for name, (other, _, _) in SOUND.items():
        for rank, found in enumerate(ranks):
            assert furthest(found[name], plain[other], rank) < 1e-12, name
        report = compare(folder / other, folder / name)
        assert report.sound, f"{name}: {report}"
        assert not report.count("unseen"), f"{name}: {report}"


def test_parts_of_which_nobody_knows_the_place_are_not_judged(runs, capsys):
    folder, _, _ = runs
    cut_unevenly(folder / "whole")
    assert not compare(folder / "whole", folder / "uneven").sound
    assert main(["compare", str(folder / "whole"), str(folder / "uneven")]) == 3
    reason = "gradient 0.weight: shards of [(2, 4), (3, 4)] fit no place in [(5, 4)]"
    said = capsys.readouterr().out
    assert said.startswith("not judged, 2 of the training's results: 0.weight before the step: ")
    assert reason in said


def test_what_a_loss_counts_is_taken_from_the_gradients_if_nobody_says_it(runs):
    folder, _, _ = runs
    double(folder / "single")
    found = [
        compare(folder / "single", folder / name).found[0].birth
        for name in ("doubled", "doubled-and-said")
    ]
    assert [birth.direction for birth in found] == ["synchronisation", "backward"]
    assert found[1].modules == ["loss"]


@pytest.mark.parametrize("page", ["docs/bisect.md", "docs/zh/bisect.md"])
def test_the_guide_shows_these_reports(page, runs, monkeypatch, capsys):
    monkeypatch.chdir(runs[0])
    found = re.findall(
        r"^```console\npython -m scaletorch.bisect (compare \S+ \S+)\n```\n+```text\n(.*?)^```",
        (ROOT / page).read_text(encoding="utf-8"),
        re.S | re.M,
    )
    assert len(found) == 2
    for command, shown in found:
        main(command.split())
        assert rounded(capsys.readouterr().out) == rounded(shown), command


def test_transformers_by_its_own_tensor_parallelism(tmp_path):
    pytest.importorskip("transformers")
    preload("transformers.models.llama.modeling_llama")
    importlib.import_module("with_transformers").save(tmp_path / "model")
    plain = train_transformers(tmp_path, "one")
    for rank, found in enumerate(run_ranks(train_transformers, 2, tmp_path, "two")):
        assert furthest(found, plain, rank) < 1e-12
    report = compare(tmp_path / "one", tmp_path / "two")
    assert report.sound, report
    assert not report.count("unseen"), report

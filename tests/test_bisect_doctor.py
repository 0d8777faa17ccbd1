"""Scripts without a line of this library, alone and on ranks: right ones, and faults in them."""

import gc
import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from sweeps import today

from scaletorch.bisect import doctor as doctor_module
from scaletorch.bisect.__main__ import main, parse
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, run_ranks

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "examples" / "bisect" / "plain_training.py"
sys.path.extend({str(TRAIN.parent)}.difference(sys.path))
preload(
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "accelerate",
    "scaletorch.bisect",
)

STATUS = {  # of the words behind the script, and what its report says
    "ddp": (0, "no result of the training differs"),
    "ddp unsummed": (1, "born in synchronisation"),
    "ddp mean": (1, "1. the loss"),
    "ddp dropped": (1, r"of the 4 rows of the batch no rank has \[\(1, 2\), \(3, 4\)\]"),
    "ddp weights": (1, "1. head.weight before the step"),
    "ddp fixed": (2, "2 rows in .*alone, 4 on 2 ranks"),
    "fsdp2": (0, "no result of the training differs"),
    "fsdp2 mean": (1, "1. the loss"),
    "tensor": (0, "no result of the training differs"),
    "tensor norm": (1, "1. gradient norm.weight.*\n  born in synchronisation"),
    "pipeline": (0, "no result of the training differs"),
    "pipeline mean": (1, "1. the loss"),
    "accelerate": (0, "no result of the training differs"),
    "accelerate mean": (1, "1. the loss"),
}
AUTO = """
import os, sys, torch, torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

several = int(os.environ.get("WORLD_SIZE", "1")) > 1
options = {"distributed_config": DistributedConfig(tp_plan="auto")} if several else {}
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **options)
if several and sys.argv[2] == "fault":
    up = model.model.layers[0].mlp.up_proj
    up.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(16).view(2, 8) % 7
for step in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


SHOWN = "ddp weights"  # in the guide


def roughly(text):
    """Leave out figures that rounding decides."""
    return re.sub(r"\d\.\de-\d\d", "…", text)


class Left(BaseException):
    """A script is over: in a test its process goes on."""


def leave():
    raise Left


def run_script(folder, words, perturbed):
    """Follow a script in this process until it is left."""
    if "pipeline" in words:
        gc.collect()  # the stages of the script before are none of this one
    path, argv, doctor_module.leave = list(sys.path), list(sys.argv), leave
    try:
        doctor_module.follow(folder, str(words[0]), words[1:], perturbed=perturbed)
    except Left:
        return ""
    finally:
        sys.path[:], sys.argv[:] = path, argv
        if state := sys.modules.get("accelerate.state"):
            state.AcceleratorState._reset_state()
    return "it was not left"


def run_all(cases):
    """Run scripts on a rank, one after the other in one group."""
    dist.init_process_group("gloo")
    dist.init_process_group = lambda *_, **__: None
    return [run_script(folder, words, False) for folder, words in cases]


def check(status, script, folder, monkeypatch, capsys):
    """Run the command for each entry, ranks in one launch, and scripts alone in this process."""
    given = {words: [str(script), *words.split()] for words in status}
    run_ranks(
        run_all, 2, [(folder / w / "ranks", each) for w, each in given.items()], init=False,
        timeout=280,
    )  # fmt: skip
    done = {}

    def run(place, words, ranks, *, perturbed=False):
        if ranks:
            return ""
        fault = words[-1] if words[-1] in ("mean", "fixed", "accelerate") else ""
        if (fault, perturbed) in done:
            shutil.copytree(done[fault, perturbed], place)
            return ""
        done[fault, perturbed] = place
        return run_script(place, words, perturbed)

    monkeypatch.setattr(doctor_module, "_run", run)
    for words, (wanted, text) in status.items():
        found = main(["doctor", *given[words], "--nproc", "2", "--keep", str(folder / words)])
        out = capsys.readouterr()
        assert found == wanted, f"{words}: {out}"
        assert re.search(text, out.out + out.err), f"{words}: {out}"
        if words == SHOWN:
            report = out.out.partition("again: ")[0]
            for page in ("docs/bisect.md", "docs/zh/bisect.md"):
                assert roughly(report) in roughly((ROOT / page).read_text(encoding="utf-8"))


def test_scripts_are_right_and_faults_in_them_found(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    faults = [words for words in STATUS if words.startswith("ddp ") and words != SHOWN]
    kinds = today(["fsdp2", "tensor", "pipeline", "accelerate"], 4)
    others = [words for words in STATUS if words.startswith(tuple(kinds))]
    tried = ["ddp", SHOWN, *today(faults, 2), *others]
    check({words: STATUS[words] for words in tried}, TRAIN, tmp_path, monkeypatch, capsys)


def test_transformers_by_its_own_tensor_parallelism(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    importlib.import_module("with_transformers").save(tmp_path / "model")
    script = tmp_path / "auto.py"
    script.write_text(AUTO)
    status = {
        f"{tmp_path / 'model'} right": (0, "no result of the training differs"),
        f"{tmp_path / 'model'} fault": (1, "layers.0.mlp"),
    }
    check(status, script, tmp_path, monkeypatch, capsys)


def test_words_of_the_command():
    cases = {
        "doctor train.py --lr 0.1 data --nproc 4 --flag": (["--lr", "0.1", "data", "--flag"], 4),
        "doctor --nproc 3 train.py -- --nproc 5 --out x": (["--nproc", "5", "--out", "x"], 3),
        "doctor train.py": ([], 2),
    }
    for words, (arguments, nproc) in cases.items():
        parsed = parse(words.split())
        assert (str(parsed.script), parsed.words, parsed.nproc) == ("train.py", arguments, nproc)
    with pytest.raises(SystemExit):
        parse(["compare", "one", "two", "--nproc", "2"])


def test_scripts_without_a_step_are_refused(tmp_path, monkeypatch):
    script = tmp_path / "stepless.py"
    script.write_text("import torch; torch.nn.Linear(1, 1)(torch.ones(1))")
    with pytest.raises(SystemExit, match="no optimizer made a step"):
        run_script(tmp_path, [str(script)], perturbed=False)


UNSEEDED = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0)
{seeded}
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
"""


def test_scripts_that_differ_from_themselves_are_refused(tmp_path, monkeypatch, capsys):
    def run(place, words, _, *, perturbed=False):
        return run_script(place, words, perturbed)

    monkeypatch.setattr(doctor_module, "_run", run)
    ones = "torch.nn.init.ones_(model.weight); torch.nn.init.ones_(model.bias); torch.seed()"
    for line, text in (("", "weight before the step"), (ones, "input 0 of the model")):
        script = tmp_path / "unseeded.py"
        script.write_text(UNSEEDED.format(seeded=line))
        assert main(["doctor", str(script), "--keep", str(tmp_path / text)]) == 2
        assert f"two runs of the script alone differ: {text}" in capsys.readouterr().err


def test_what_is_trained_beside_the_model_is_refused(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO.replace("# one", "both = nn.Sequential(first, second)"))
    assert not run_script(tmp_path, [str(script)], perturbed=False)
    script.write_text(TWO)
    with pytest.raises(SystemExit, match="optimizers train more than the model that is called"):
        run_script(tmp_path, [str(script)], perturbed=False)


TWO = """
import torch
from torch import nn
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
# one
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
second(first(torch.ones(2, 4))).sum().backward()
optimizer.step()
"""
PLAIN = """
import os, torch, torch.distributed as dist
torch.manual_seed(0)
model, data = torch.nn.Linear(4, 1), torch.randn(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    data = data.chunk(2)[dist.get_rank()]
model(data).square().mean().backward()
optimizer.step()
raise OSError("ran on")
"""


def test_processes(tmp_path, capsys):
    """The command as it is called: ranks that sum nothing, and a script that fails."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    assert main(["doctor", str(script)]) == 1
    assert "a mean over all ranks is missing" in capsys.readouterr().out


def test_a_script_that_fails_is_shown(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'OSError: no data'; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)failed when it ran alone:.*OSError: no data"
    ):
        doctor_module.doctor(tmp_path / "script.py", [], 2, tmp_path / "runs")

"""The tool for GPUs, by a dry run on the CPU: groups pass, fail, hang and are skipped."""

import json
from pathlib import Path

import pytest
import torch
from tools.gpu import __main__ as command
from tools.gpu import checks, groups, kernels, matrix
from tools.gpu.checks import Checks, Found, Skip

from scaletorch.dist.errors import RankFailedError
from scaletorch.dist.testing import preload

ROOT = Path(__file__).resolve().parent.parent


def test_without_a_cuda_device_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert said == "no CUDA device that torch can use: --device cpu is a dry run\n"


def test_two_groups_have_rows_in_the_table_and_in_the_file(tmp_path, capsys):
    out = tmp_path / "found.json"
    names = ["kernel tile", "kernel cudnn"]
    assert command.main(["--device", "cpu", "--quick", "--out", str(out), "--only", *names]) == 0
    found = {each["name"]: each for each in json.loads(out.read_text())["groups"]}
    assert {name: each["word"] for name, each in found.items()} == {
        "kernel cudnn": checks.SKIPPED,
        "kernel tile": checks.PASSED,
    }
    assert 0 < found["kernel tile"]["worst_error"] < 1e-3
    table = capsys.readouterr().out.splitlines()
    assert any(line.startswith("kernel tile") and " passed " in line for line in table)


def test_every_group_names_a_function():
    assert len({group.name for group in groups.GROUPS}) == len(groups.GROUPS)
    assert groups.GROUPS[0].name.startswith("matrix")
    for group in groups.GROUPS:
        file, _, function = group.function.partition(".")
        text = (ROOT / "tools" / "gpu" / f"{file}.py").read_text()
        assert f"\ndef {function}(" in text, group


def written(tmp_path, check, *args):
    own = Checks(tmp_path / "rows", "cpu", True, 60.0)
    own.run("one", check, *args)
    (row,) = checks.rows(tmp_path / "rows")
    return row


OUTCOMES = [
    (Found(1e-6, 1e-5), checks.PASSED),
    (Found(1e-4, 1e-5), checks.FAILED),
    (Found(float("nan"), 1e-5), checks.FAILED),
    (Skip("not here"), checks.SKIPPED),
    (ValueError("wrong"), checks.FAILED),
    (RankFailedError("two ranks", failures={1: "ValueError: x\n"}), checks.FAILED),
    (RankFailedError("late", hung=(0, 1)), checks.HUNG),
    (TimeoutError("not free"), checks.HUNG),
]


def come_to(outcome):
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@pytest.mark.parametrize(("outcome", "word"), OUTCOMES)
def test_a_check_is_written_down(tmp_path, outcome, word):
    assert written(tmp_path, come_to, outcome).word == word


@pytest.mark.parametrize("name", kernels.CALLS)
def test_a_wrong_kernel_is_seen(name, monkeypatch):
    case, right = (torch.float32, 4, 2, 16, 513, 513), kernels.attention
    found = kernels._call("cpu", case, kernels.CALLS[name])
    assert found.error < found.bound
    monkeypatch.setattr(kernels, "attention", lambda *qkv, **how: right(*qkv, **how) * (1 + 1e-3))
    found = kernels._call("cpu", case, kernels.CALLS[name])
    assert found.error > found.bound


def test_the_messages_of_four_stages_arrive(tmp_path):
    preload("tools.gpu.matrix")
    row = written(tmp_path, matrix._alone, Checks(tmp_path / "other", "cpu", True, 200.0))
    assert row.word == checks.PASSED, row

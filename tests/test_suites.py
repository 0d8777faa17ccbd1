"""Suites: lines that ranks and programs ran count, and tests may not skip for what is there."""

import os
import shutil
import subprocess
import sys

import pytest
from tools.testing import covered, skips
from tools.testing.covered import Covered

MODULE = """
import os

def in_rank():
    return 1

def in_process():
    os._exit(0)

def killed():
    os.kill(os.getpid(), 9)

def never():
    a = 1
    return a
"""

PROGRAM = """
import subprocess, sys
from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import run_ranks
import tiny

if __name__ == "__main__":
    assert run_ranks(tiny.in_rank, 2) == [1, 1]
    try:
        run_ranks(tiny.killed, 2)  # the same ranks, which do not leave by themselves
    except RankFailedError:
        pass
    subprocess.run([sys.executable, "-c", "import tiny; tiny.in_process()"], check=True)
"""


def test_lines_of_ranks_and_programs_count(tmp_path, monkeypatch):
    monkeypatch.setattr(covered, "portions", lambda package: ["tiny"])
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "__init__.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text(covered.START)
    shutil.copy(covered.START_MODULE, tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, *covered.measuring("tiny", tmp_path), "program.py"]
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=200)
    found = covered.collect("tiny", tmp_path)
    assert found == Covered("tiny", 10, 7, {"tiny/__init__.py": [11, 14, 15]})
    table = covered.table([found, Covered("a", 200, 190, {"x.py": [1]})])
    assert "a                    200      190    95.0\n" in table
    assert "70.0  below 90\n" in table
    assert table.endswith("tests do not run:\n  tiny/__init__.py: 11, 14-15")


SKIPPING = """
import pytest

REASONS = ["hatch env create ray", "scontrol is not installed", "no CUDA device", "no CUDA device"]

@pytest.mark.parametrize("reason", REASONS)
def test_it(reason):
    pytest.skip(reason)

def test_that_passes(): pass

def test_of_a_library():
    pytest.importorskip("no_such_library")
"""


def test_what_the_machine_has_may_not_be_missing(tmp_path):
    (tmp_path / "test_it.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    reasons = skips.skipped(tmp_path / "report.xml")
    assert reasons["no CUDA device"] == 2
    assert sorted(map(skips.lacking, reasons)) == ["cuda", "libraries", "ray", "slurm"]
    assert skips.forbidden(reasons, None) == skips.forbidden(reasons, "compiler") == []
    assert skips.forbidden(reasons, "ray mpi") == ["1 skipped: hatch env create ray"]
    assert skips.forbidden(reasons, "cuda") == ["2 skipped: no CUDA device"]
    unknown = skips.Counter({"it is Monday": 1})
    assert skips.forbidden(unknown, "ray") == ["1 skipped: it is Monday"]
    assert skips.forbidden(unknown, None) == []
    with pytest.raises(ValueError, match=r"\['slurn'\] are none of"):
        skips.forbidden(reasons, "slurn")

"""Importing the package: quick, silent, and possible from anywhere under any name."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import scaletorch.dist as dist

LATER = {"backends", "bench", "functional", "guard", "mpi", "testing"}

OBSERVE = """
import os, signal, sys, threading, torch

def state():
    return dict(os.environ), {n: signal.getsignal(n) for n in signal.valid_signals()}

before, known = state(), set(sys.modules)
from scaletorch.dist import *
print(*sorted(set(sys.modules) - known))
from scaletorch.dist.testing import *
assert before == state() and threading.active_count() == 1
assert not torch.distributed.is_initialized()
assert "torch._dynamo" not in sys.modules and "mpi4py" not in sys.modules
assert not any(name.startswith("torch_") for name in sys.modules)
"""

VENDORED = """
from other.name.dist import launch, all_reduce
import other.name.dist as vendored
import sys, torch

def total():
    data = torch.ones(1)
    all_reduce(data)
    assert not any(name.split(".")[0] == "scaletorch" for name in sys.modules)
    return data.item()

if __name__ == "__main__":
    print(launch(total, 2))
"""


def python(program, **options):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_brings_little_beyond_torch_and_changes_and_prints_nothing():
    """benchmarks/importing has the time that it takes."""
    own = "scaletorch.dist."
    (brought,) = python(OBSERVE).splitlines()
    others = [name for name in brought.split() if name.partition(".")[0] != "scaletorch"]
    assert {name.partition(".")[0] for name in others} <= sys.stdlib_module_names
    assert len(others) <= 6, others
    first = {name.removeprefix(own).partition(".")[0] for name in brought.split()}
    assert not first & LATER
    assert len(brought.split()) < 90, "each module of ours takes about half a millisecond"


def run_a_copy(folder):
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / "program.py"), run_name="__main__")


def test_a_copy_under_another_name_launches_ranks(tmp_path, capfd):
    """Their processes have nothing else of this library."""
    source = Path(dist.__file__).parent
    shutil.copytree(source, tmp_path / "other" / "name" / "dist")
    (tmp_path / "program.py").write_text(VENDORED)
    dist.launch(run_a_copy, 1, tmp_path, init=False, timeout=200)
    assert capfd.readouterr().out == "[2.0, 2.0]\n"

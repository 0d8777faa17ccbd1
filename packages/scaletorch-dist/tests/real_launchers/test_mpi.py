"""mpirun itself, of Open MPI and of MPICH."""

import sys

import pytest


def test_mpirun_without_mpi4py(launch, mpirun, programs):
    """Rank 0 is a child of mpirun's, rank 1 one of a shell's."""
    _, command, variables, _ = mpirun
    program = [sys.executable, programs / "place.py", launch.folder, "mpi"]
    shell = ["sh", "-c", f"{' '.join(map(str, program))}; exit $?"]
    both = [*command, "-n", "1", *program[:-1], ":", "-n", "1", *shell]
    status, _, err = launch.run(both, **variables)
    assert status == 0, err
    assert launch.places() == [f"({rank}, 2, {rank}, 2) 2.0 mpi" for rank in range(2)]


@pytest.mark.parametrize("mpirun", ["openmpi"], indirect=True)
def test_nodes_meet_through_mpi4py(launch, mpirun, programs):
    """Ranks that take this host for as many as there are ranks."""
    _, command, variables, with_mpi4py = mpirun
    apart = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", sys.executable]
    program = [programs / "place.py", launch.folder]
    status, _, err = launch.run([*command, "-n", "2", *apart, *program], **variables, **with_mpi4py)
    assert status == 0, err
    assert launch.places() == [f"({rank}, 2, {rank}, 1) 2.0 mpi" for rank in range(2)]


@pytest.mark.parametrize("mpirun", ["mpich"], indirect=True)
def test_the_example_for_mpirun(launch, mpirun, examples):
    _, command, variables, _ = mpirun
    own = " ".join(map(str, command))
    status, out, err = launch.run([examples / "mpi.sh"], MPIRUN=own, **variables)
    assert status == 0, err
    assert "mpi: 2 ranks, loss" in out

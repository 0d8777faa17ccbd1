"""mpirun itself, of Open MPI and of MPICH."""

import sys

import pytest

LOCAL_SIZE = {"openmpi": "OMPI_COMM_WORLD_LOCAL_SIZE", "mpich": "MPI_LOCALNRANKS"}


def test_mpirun_without_mpi4py(launch, mpirun, programs):
    """Rank 0 is a child of mpirun's, rank 1 one of a shell's."""
    _, command, variables, _ = mpirun
    program = [sys.executable, programs / "place.py", launch.folder, "mpi"]
    shell = ["sh", "-c", f"{' '.join(map(str, program))}; exit $?"]
    both = [*command, "-n", "1", *program[:-1], ":", "-n", "1", *shell]
    status, _, err = launch.run(both, **variables)
    assert status == 0, err
    assert launch.places() == [f"({rank}, 2, {rank}, 2) 2.0 mpi" for rank in range(2)]


def one_rank_a_node(kind, command, program):
    """Ranks that take this host for as many as there are ranks."""
    return [*command, "-n", "2", "env", f"{LOCAL_SIZE[kind]}=1", sys.executable, *program]


def test_nodes_meet_through_mpi4py(launch, mpirun, programs):
    kind, command, variables, with_mpi4py = mpirun
    program = [programs / "place.py", launch.folder]
    command = one_rank_a_node(kind, command, program)
    status, _, err = launch.run(command, **variables, **with_mpi4py)
    assert status == 0, err
    assert launch.places() == [f"({rank}, 2, {rank}, 1) 2.0 mpi" for rank in range(2)]


@pytest.mark.parametrize("mpirun", ["openmpi"], indirect=True)
def test_nodes_without_mpi4py_are_told_what_would_do(launch, mpirun, programs):
    kind, command, variables, _ = mpirun
    command = one_rank_a_node(kind, command, [programs / "place.py", launch.folder])
    status, _, err = launch.run(command, **variables)
    assert status != 0
    assert "MPI does not say where rank 0 is: set MASTER_ADDR" in err


@pytest.mark.parametrize("mpirun", ["mpich"], indirect=True)
def test_nodes_with_an_address_need_no_mpi4py(launch, mpirun, programs, free_port):
    kind, command, variables, _ = mpirun
    command = one_rank_a_node(kind, command, [programs / "place.py", launch.folder])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    status, _, err = launch.run(command, **variables, **address)
    assert status == 0, err
    assert launch.places() == [f"({rank}, 2, {rank}, 1) 2.0 mpi" for rank in range(2)]


@pytest.mark.parametrize("mpirun", ["mpich"], indirect=True)
def test_the_example_for_mpirun(launch, mpirun, examples):
    _, command, variables, _ = mpirun
    own = " ".join(map(str, command))
    status, out, err = launch.run([examples / "mpi.sh"], MPIRUN=own, **variables)
    assert status == 0, err
    assert "mpi: 2 ranks, loss" in out

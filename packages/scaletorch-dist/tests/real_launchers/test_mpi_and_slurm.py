"""mpirun of Open MPI and of MPICH, Slurm with two virtual nodes, and examples that users copy."""

import os
import sys
import time

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


def expected(sizes):
    world = sum(sizes)
    places = [(local, size) for size in sizes for local in range(size)]
    return [
        f"({rank}, {world}, {local}, {size}) {world}.0 slurm"
        for rank, (local, size) in enumerate(places)
    ]


def test_srun_on_two_nodes_whose_names_do_not_resolve(launch, slurm, programs):
    program = [sys.executable, programs / "place.py", launch.folder, "slurm"]
    srun = ["srun", "-N2", "-n3", "--distribution=block"]
    status, _, err = launch.run([*srun, *program], **slurm)
    assert status == 0, err
    assert launch.places() == expected([2, 1])


def test_a_batch_script_of_one_rank_a_task(launch, slurm, examples):
    """On one node, and the launcher is found by its variables."""
    status, output = launch.batch(slurm, ["-N1", examples / "slurm.sbatch"])
    assert status == 0, output
    assert "slurm: 2 ranks, loss" in output


SLOW = ("ray", "slurm")
TODAY = SLOW
if os.environ.get("SCALETORCH_SWEEPS") != "all":
    TODAY = SLOW[int(time.time() // 86400) % len(SLOW) :][:1]


def by_ray(launch, examples, ray):
    command = [sys.executable, examples / "ray_train.py", "--workers", "2"]
    status, out, err = launch.run(command, timeout=240, **ray)
    return status, out + err, "Ray: 2 ranks, 2 on a node, loss"


def by_slurm(launch, examples, slurm):
    variables = {"MASTER_ADDR": "127.0.0.1", "RANKS_PER_NODE": "1"}
    result = launch.batch(slurm, [examples / "slurm_torchrun.sbatch"], **variables)
    return *result, "pytorch: 2 ranks, loss"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", TODAY)
def test_an_example(launch, examples, request, launcher):
    run = {"ray": by_ray, "slurm": by_slurm}[launcher]
    status, output, expected = run(launch, examples, request.getfixturevalue(launcher))
    assert status == 0, output
    assert expected in output

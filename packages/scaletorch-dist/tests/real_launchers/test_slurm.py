"""Slurm itself: two virtual nodes without DNS names on this host."""

import sys


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

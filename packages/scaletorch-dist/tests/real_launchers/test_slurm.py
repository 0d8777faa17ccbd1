"""Slurm itself: two virtual nodes without DNS names on this host."""

import re
import sys
import time

import pytest


def expected(sizes, launcher="slurm"):
    world = sum(sizes)
    places = [(local, size) for size in sizes for local in range(size)]
    return [
        f"({rank}, {world}, {local}, {size}) {world}.0 {launcher}"
        for rank, (local, size) in enumerate(places)
    ]


def test_srun_on_one_node_with_the_launcher_named(launch, slurm, programs):
    program = [sys.executable, programs / "place.py", launch.folder, "slurm"]
    status, _, err = launch.run(["srun", "-N1", "-n2", *program], **slurm)
    assert status == 0, err
    assert launch.places() == expected([2])


def test_srun_on_two_nodes_whose_names_do_not_resolve(launch, slurm, programs):
    program = [sys.executable, programs / "place.py", launch.folder]
    srun = ["srun", "-N2", "-n3", "--distribution=block"]
    status, _, err = launch.run([*srun, *program], **slurm)
    assert status == 0, err
    assert launch.places() == expected([2, 1])


def batch(launch, slurm, script, **variables):
    """Run a batch script as users do; (exit status of the job, what it printed)."""
    output = launch.folder / "output"
    command = ["sbatch", "--parsable", f"--output={output}", script]
    status, job, err = launch.run(command, cwd=script.parent, **slurm, **variables)
    assert status == 0, err
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline:  # sbatch --wait asks at ever longer intervals
        _, shown, _ = launch.run(["scontrol", "-o", "show", "job", job.strip()], **slurm)
        state, code = re.search(r"JobState=(\w+).* ExitCode=(\d+):", shown).groups()
        if state not in ("PENDING", "RUNNING", "COMPLETING"):
            return int(code), output.read_text()
        time.sleep(0.2)
    launch.run(["scancel", job.strip()], **slurm)
    pytest.fail(f"the job does not end: {shown}\n{output.read_text()}")


def test_a_batch_script_of_one_rank_a_task(launch, slurm, examples):
    status, output = batch(launch, slurm, examples / "slurm.sbatch")
    assert status == 0, output
    assert "slurm: 4 ranks, loss" in output


def test_torchrun_under_srun(launch, slurm, examples):
    script = examples / "slurm_torchrun.sbatch"
    status, output = batch(launch, slurm, script, MASTER_ADDR="127.0.0.1")
    assert status == 0, output
    assert "pytorch: 4 ranks, loss" in output

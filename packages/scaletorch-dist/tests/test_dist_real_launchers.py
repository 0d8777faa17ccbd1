"""srun and mpirun themselves, on machines that have them."""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import scaletorch.dist as dist

dist.init_dist(sys.argv[1] if len(sys.argv) > 1 else None, backend="gloo", timeout=60)
data = torch.ones(1)
dist.all_reduce(data)
place = (*dist.get_dist_info(), dist.get_local_rank(), dist.get_local_size())
sys.stdout.write(f"{place} {data.item()} {dist.infer_launcher()}\\n")
dist.cleanup_dist()
"""
TASKS = 2


def run_program(command, arguments, **variables):
    command = [*command, sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def lines_expected(launcher):
    return [f"({rank}, {TASKS}, {rank}, {TASKS}) {TASKS}.0 {launcher}" for rank in range(TASKS)]


def require_slurm():
    if shutil.which("srun") is None or shutil.which("scontrol") is None:
        pytest.skip("srun is not on PATH")
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=60)
    if ping.returncode != 0 or " is UP" not in ping.stdout:
        pytest.skip("no Slurm controller answers")


@pytest.mark.parametrize("arguments", [["slurm"], []], ids=["named", "inferred"])
def test_srun_itself(arguments):
    require_slurm()
    done = run_program(["srun", "--immediate=30", "-N", "1", "-n", str(TASKS)], arguments)
    if "Unable to allocate resources" in done.stderr:
        pytest.skip(f"Slurm has no room: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines_expected("slurm")


def mpirun():
    """The command, with what Open MPI wants in containers and on small machines."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on PATH")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60)
    is_open_mpi = "Open MPI" in version.stdout + version.stderr
    return ["mpirun", *(["--oversubscribe"] if is_open_mpi else []), "-n", str(TASKS)]


@pytest.mark.parametrize("arguments", [["mpi"], []], ids=["named", "inferred"])
def test_mpirun_itself(arguments):
    names = [f"{p}_ALLOW_RUN_AS_ROOT{s}" for p in ("OMPI", "PRTE") for s in ("", "_CONFIRM")]
    done = run_program(mpirun(), arguments, **dict.fromkeys(names, "1"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines_expected("mpi")

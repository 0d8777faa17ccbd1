"""Examples that users copy, of launchers that take a minute to begin: another one each day."""

import os
import sys
import time

import pytest

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

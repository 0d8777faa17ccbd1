"""Ray Train itself, by the example that users copy."""

import sys

import pytest


@pytest.mark.timeout(300)  # Ray takes over a minute to begin on a busy machine
def test_the_example_for_ray(launch, examples, ray):
    command = [sys.executable, examples / "ray_train.py", "--workers", "2"]
    status, out, err = launch.run(command, timeout=240, **ray)
    assert status == 0, err
    assert "Ray: 2 ranks, 2 on a node, loss" in out

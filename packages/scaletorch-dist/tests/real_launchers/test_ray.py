"""Ray Train itself, by the example that users copy."""

import sys


def test_the_example_for_ray(launch, examples, ray):
    command = [sys.executable, examples / "ray_train.py", "--workers", "2"]
    status, out, err = launch.run(command, timeout=100, **ray)
    assert status == 0, err
    assert "Ray: 2 ranks, 2 on a node, loss" in out

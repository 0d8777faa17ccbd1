"""The command that checks and draws a schedule, with no process group at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as torch_dist

from scaletorch.parallel.pipeline_parallel.__main__ import main

SMALL = ["--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]
PICTURE = """\
rank 0  F0 F1 .. .. B0--- .. B1---
rank 1  .. F0 B0--- F1 B1--- .. ..

1f1b: makespan 9, bubble 33.3 %
peak live activations: 2 1
"""


def test_as_a_module_in_an_environment_of_many_ranks():
    command = [sys.executable, "-m", "scaletorch.parallel.pipeline_parallel", *SMALL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={"WORLD_SIZE": "64", "RANK": "3"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, PICTURE, "")


def test_costs(capsys):
    assert main([*SMALL, "--forward", "2", "--backward", "2", "--message", "1"]) == 0
    assert capsys.readouterr().out.startswith(
        "rank 0  F0--- F1--- .. .. .. .. B0--- .. .. B1---\n"
        "rank 1  .. .. .. F0--- B0--- F1--- B1--- .. .. ..\n"
    )
    assert not torch_dist.is_initialized()


def test_the_parts_of_a_backward_take_half_each(capsys):
    arguments = ["--schedule", "zb_h1", "--stages", "1", "--micro-batches", "1", "--backward", "4"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("rank 0  F0 I0--- W0---\n")


def test_chunks(capsys):
    arguments = ["--schedule", "looped_bfs", "--stages", "2", "--micro-batches", "1"]
    assert main(arguments) == main([*arguments, "--chunks", "2"]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert out.startswith("rank 0  F0 .. f0 .. .. .. b0--- .. .. B0---\n")
    assert main([*arguments, "--chunks", "3"]) == 0
    assert "F0.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SMALL, "--chunks", "2"], "--chunks is for interleaved_1f1b, looped_bfs"),
        ([*SMALL, "--forward", "0"], "costs of actions and factors of stages must be positive"),
        ([*SMALL, "--stages", "0"], "at least 1 of ranks, got 0"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("python -m scaletorch.parallel.pipeline_parallel: error: ")
    assert said in streams.err


def test_without_torch(tmp_path):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from scaletorch.parallel.pipeline_parallel.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = "--schedule zb_v --stages 2 --micro-batches 4"
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()], cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "zb_v: makespan" in done.stdout
    assert not [*tmp_path.iterdir()]

"""The command that prints a grid, with no process group at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as torch_dist

from scaletorch.parallel.pg_manager.__main__ import main

OVERVIEW = """\
Grid [DP 2, PP 16, CP 4, TP 8]: 1024 ranks on 128 nodes of 8

axis   size  groups  nodes    first groups
tp        8     128      1    [0-7] [8-15] ...
cp        4     256      4    [0, 8, 16, 24] [1, 9, 17, 25] ...
pp       16      64     16    [0, 32, 64, ..., 480] [1, 33, 65, ..., 481] ...
dp        2     512      2    [0, 512] [1, 513] ...
cp_dp     8     128      8    [0, 8, 16, ..., 536] [1, 9, 17, ..., 537] ...
pp_dp    32      32     32    [0, 32, 64, ..., 992] [1, 33, 65, ..., 993] ...
world  1024       1    128    [0-1023]

within a node: tp
cross nodes: cp, pp, dp, cp_dp, pp_dp, world
"""

PLACE = """
rank 300 of 1024: dp0 pp9 cp1 tp4, node 37, local rank 4

axis         place    group
tp          4 of 8    [296-303]
cp          1 of 4    [292, 300, 308, 316]
pp         9 of 16    [12, 44, 76, ..., 492]
dp          0 of 2    [300, 812]
cp_dp       1 of 8    [292, 300, 308, ..., 828]
pp_dp      9 of 32    [12, 44, 76, ..., 1004]
world  300 of 1024    [0-1023]

cp ring: sends to rank 308, receives from rank 292
pipeline: previous stage on rank 268, next stage on rank 332
"""

LAYOUT = ["--tp", "8", "--cp", "4", "--pp", "16", "--dp", "2", "--gpus-per-node", "8"]


def test_overview_and_place_of_a_rank(capsys):
    assert main([*LAYOUT, "--rank", "300"]) == 0
    assert capsys.readouterr().out == OVERVIEW + PLACE
    assert not torch_dist.is_initialized()


def test_experts_have_their_axes_where_the_view_is_not_plain(capsys):
    layout = ["--tp", "2", "--pp", "2", "--dp", "2"]
    assert main([*layout, "--ep", "2", "--rank", "7"]) == 0
    said = capsys.readouterr().out
    for line in (
        "Grid [DP 2, PP 2, CP 1, TP 2], experts [EDP 2, EP 2, ETP 1]: 8 ranks",
        "edp       2       4    [0, 4] [1, 5] ...",
        "rank 7 of 8: dp1 pp1 cp0 tp1 edp1 ep1 etp0",
        "ep     1 of 2    [6-7]",
        "pipeline: previous stage on rank 5, next stage none",
    ):
        assert line in said.splitlines()
    assert main([*layout, "--ep", "2", "--etp", "2"]) == 0
    assert "experts [EDP 1, EP 2, ETP 2]: 8 ranks" in capsys.readouterr().out
    assert main([*layout, "--etp", "2"]) == 0
    assert "ep" not in capsys.readouterr().out


def test_as_a_module_in_an_environment_of_many_ranks():
    command = [sys.executable, "-m", "scaletorch.parallel.pg_manager", "--pp", "2", "--rank", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={"WORLD_SIZE": "64", "RANK": "3"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Grid [DP 1, PP 2, CP 1, TP 1]: 2 ranks\n\naxis   size  groups")
    assert done.stdout.endswith("pipeline: previous stage on rank 0, next stage none\n")
    assert "nodes" not in done.stdout


def test_a_last_node_that_is_not_full(capsys):
    assert main(["--dp", "10", "--gpus-per-node", "4"]) == 0
    assert "10 ranks on 3 nodes of 4 (the last has 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "0"], "tp size must be a positive int, got 0"),
        (["--tp", "2", "--rank", "2"], "rank must be an int from 0 to 1, got 2"),
        (["--dp", "4", "--ep", "3"], "nearest legal ep sizes: 4, 2, 1"),
        (["--tp", "4", "--etp", "2"], "etp size must be 1 (whole experts) or the tp size 4, got 2"),
        (["--gpus-per-node", "0"], "--gpus-per-node must be a positive int, got 0"),
        (["--tp", "100000", "--dp", "1000"], "more than the 10000000 that are listed"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("python -m scaletorch.parallel.pg_manager: error: ")
    assert said in streams.err


def test_arguments_that_are_no_numbers(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--tp", "two"])
    assert caught.value.code == 2
    assert "argument --tp: invalid int value: 'two'" in capsys.readouterr().err

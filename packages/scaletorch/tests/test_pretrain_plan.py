"""A run on the layout that a plan chose, and its word on whether the plan was right."""

import re

import pytest

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.models import LlamaConfig
from scaletorch.plan import Cluster, Device, Link, write_cluster
from scaletorch.pretrain.__main__ import main
from scaletorch.pretrain.config import PretrainConfig
from scaletorch.pretrain.planning import chosen

SMALL = ["--seq-len", "16", "--model.num-layers", "2", "--model.hidden-size", "32"]
MODEL = LlamaConfig(num_layers=2, hidden_size=32)


def cluster(path, *, ranks=2, memory=2**30):
    """Write a cluster whose ranks compute ten times as fast as this machine's."""
    device = Device("stand-in", memory, {"float32": 1e12}, 1e11, 1e-6)
    write_cluster(Cluster(ranks, device, (Link(ranks, 1e-5, 1e9),)), path)
    return path


def test_a_run_says_whether_it_was_as_planned(tmp_path, capfd):
    path, saved = str(cluster(tmp_path / "cluster.json")), ["--out", str(tmp_path / "run")]
    saved += ["--save-every", "10"]
    assert main(["--plan", path, "--steps", "10", *SMALL, *saved]) == 0
    said = capfd.readouterr().out
    # Nothing here computes so fast.
    assert re.search(r"warning: a step: planned \S+ s, found \S+ \(\+.*: the plan was wrong", said)
    assert re.search(r"^TP\(1\)-.*\(2\).*: loss", said, re.MULTILINE)
    # The layout is free, whoever chose it.
    assert main(["--resume", "auto", "--steps", "11", "--decay-steps", "10", *SMALL, *saved]) == 0
    assert " in 1 steps" in capfd.readouterr().out


def test_what_cannot_be_planned_is_refused(tmp_path):
    path = cluster(tmp_path / "cluster.json", memory=2**16)
    config = PretrainConfig(plan=path, seq_len=16, model=MODEL)
    with pytest.raises(InvalidArgumentError, match=r"no layout of 2 ranks can train Llama"):
        chosen(config)
    with pytest.raises(InvalidArgumentError, match=r"--plan chooses the layout, and TP\(2\)"):
        chosen(PretrainConfig(plan=path, tp=2))
    (tmp_path / "torn.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"torn\.json"):
        chosen(PretrainConfig(plan=tmp_path / "torn.json"))

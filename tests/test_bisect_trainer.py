"""The callback for transformers' Trainer: its first step, with accumulation, alone and on ranks."""

import importlib
import sys
from pathlib import Path

import pytest

from scaletorch.bisect import compare
from scaletorch.bisect.recording.folder import read
from scaletorch.dist.testing import preload, run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "bisect"
sys.path.extend({str(EXAMPLES)}.difference(sys.path))
preload("transformers.models.llama.modeling_llama", "transformers.trainer", "scaletorch.bisect")


def train(folder):
    program = importlib.import_module("with_trainer")
    program.train(f"{folder}/two")
    program.train(f"{folder}/own-mean", own_mean=True)


def test_its_first_step_is_recorded(tmp_path):
    importlib.import_module("with_trainer").train(f"{tmp_path}/one")
    run_ranks(train, 2, tmp_path, init=False)
    report = compare(tmp_path / "one", tmp_path / "two")
    assert report.sound, report
    assert not report.count("unseen"), report
    assert {line.call for line in read(tmp_path / "two")[0][0].lines} == {0, 1}  # micro-batches
    assert {key.kind for key in report.judged} >= {"start", "loss", "gradient", "norm", "weight"}
    report = compare(tmp_path / "one", tmp_path / "own-mean")
    assert report.found, report
    assert "output loss of the model" in str(report)

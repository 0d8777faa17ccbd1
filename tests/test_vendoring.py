"""A plain copy of the ``scaletorch`` folder works inside another project."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PORTIONS = [
    "dist",
    "parallel/pg_manager",
    "parallel/tensor_parallel",
    "parallel/context_parallel",
    "parallel/pipeline_parallel",
    "parallel/data_parallel",
    "models",
    "compose",
    "checkpoint",
]

PROGRAM = """
import sys

import torch

from acme._vendor.scaletorch.compose import parallelize, shard_global_batch, train_step
from acme._vendor.scaletorch.dist import all_reduce, launch
from acme._vendor.scaletorch.models import Llama, LlamaConfig
from acme._vendor.scaletorch.parallel.pg_manager import setup_process_group_manager


def work():
    manager = setup_process_group_manager(tp_size=2)
    torch.manual_seed(0)
    model = parallelize(Llama(LlamaConfig(num_layers=1)), manager)
    ids = torch.arange(16).view(2, 8)
    micro_batches = shard_global_batch({"input_ids": ids, "labels": ids}, 1, manager)
    loss = train_step(model, micro_batches, manager)
    return loss.item(), any(name.split(".")[0] == "scaletorch" for name in sys.modules)


if __name__ == "__main__":
    (first, taken), (second, _) = launch(work, 2)
    print(first == second, taken)
"""


@pytest.fixture
def acme(tmp_path):
    """Another project with our folders copied in."""
    target = tmp_path / "acme" / "_vendor" / "scaletorch"
    for portion in PORTIONS:
        spec = importlib.util.find_spec("scaletorch." + portion.replace("/", "."))
        source = Path(spec.origin).parent
        shutil.copytree(source, target / portion, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_vendored_copy_trains_on_two_ranks(acme):
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=acme, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["True", "False"], done.stderr

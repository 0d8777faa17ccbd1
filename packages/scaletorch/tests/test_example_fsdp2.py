"""The example of FSDP2 trains as one process does, also with three axes at once."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.pg_manager import destroy_process_group_manager

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fsdp2.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="examples are not in the wheel")


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    preload("torch._dynamo")  # which FSDP2 imports


def work(**options):
    spec = importlib.util.spec_from_file_location("fsdp2", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    try:
        return example.work(dtype=torch.float64, **options)
    finally:
        destroy_process_group_manager()


@pytest.mark.parametrize("layout", ["dp2 tp2", "dp2 cp2", "dp2 cp2 tp2"])
def test_losses_and_weights_are_one_process_s(layout):
    losses, weights = work()
    sizes = {axis[:2]: int(axis[2:]) for axis in layout.split()}
    for found, whole in run_ranks(work, 2 ** len(sizes), timeout=100, **sizes):
        assert found == pytest.approx(losses, rel=1e-12)
        assert whole.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(whole[name], weight, rtol=1e-11, atol=1e-13)


@pytest.mark.timeout(300)
def test_the_program_runs_as_it_is():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    one, *others = (
        [float(number) for number in re.findall(r"\d+\.\d+", line)]
        for line in done.stdout.splitlines()
    )
    assert len(one) == 3
    assert others == [pytest.approx(one, rel=1e-5)] * 2

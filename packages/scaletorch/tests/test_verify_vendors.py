"""One layout of the proof on a stand-in for each vendor's device (see scaletorch-dist's tests)."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from small_models import small_model
from sweeps import today

import scaletorch.dist as dist
from scaletorch.bisect import bisect
from scaletorch.compose import (
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
    whole_matrices,
)
from scaletorch.dist import devices
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.ranks.locate import locate
from scaletorch.dist.testing import relative_error, run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.verify import default_batch, parse_layout, verify
from scaletorch.verify.cases import enumerate_cases
from scaletorch.verify.device import moved
from scaletorch.verify.problem import Subject, mean_loss
from scaletorch.verify.runner import run_case
from scaletorch.verify.verify import save_reference

MATRIX = "layers.0.self_attn.q_proj.weight"

pytestmark = pytest.mark.timeout(500)  # the first test may build the stand-in


def model_there():
    return small_model().to(devices.current_device())


def train(device, backend, case, reference):
    assert dist.get_backend() == backend
    subject = Subject(locate(small_model), device=device)
    return run_case(case, subject, reference), str(devices.current_device())


@pytest.mark.parametrize(
    ("device", "backend", "layout"),
    today([("npu", "hccl", "2x1x1x2"), ("mlu", "cncl", "1x2x1x2"), ("musa", "mccl", "1x1x2x2")], 3),
)
def test_a_layout_on_a_vendors_device(plugins, monkeypatch, tmp_path, device, backend, layout):
    layout = parse_layout(layout)
    reference = save_reference(
        tmp_path / "float64", Subject(locate(small_model)), default_batch, "float64"
    )
    (case,) = enumerate_cases([layout], ["float64"], {})
    monkeypatch.syspath_prepend(plugins)
    answers = run_ranks(
        train, layout.world_size, device, backend, case, reference, backend=backend, timeout=300
    )
    for rank, (report, own) in enumerate(answers):
        assert not report.failures
        assert report.compared > 20
        assert own == f"{device}:{rank}"


COMMANDS = """
import sys
from scaletorch.bisect.__main__ import main as bisect
from scaletorch.verify.__main__ import main as verify
words = sys.argv[1:]
codes = verify([*words, "--dtype", "bfloat16"]), bisect(["run", *words, "--steps", "1"])
print("codes", *codes)
"""
MODEL = ["--model", "small_models:small_model", "--layout", "1x1x1x2"]


def test_proof_and_bisect_run_on_the_machines_accelerator_by_default(plugins, tmp_path):
    """The stand-in is this machine's accelerator in a process of its own."""
    script = tmp_path / "commands.py"
    script.write_text(COMMANDS)
    path = os.pathsep.join([plugins, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), *MODEL],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "codes 0 0" in said, said
    assert "1 of 1 cases train like one process on npu over hccl: " in said


def test_a_device_or_backend_that_the_machine_has_not_is_refused():
    with pytest.raises(InvalidArgumentError, match="device must be 'cpu' on this machine, got 'n"):
        verify(layouts=[parse_layout("dp2")], device="npu")
    with pytest.raises(InvalidArgumentError, match="backend 'hccl' cannot be used: torch_npu is"):
        bisect(layout="dp2", backend="hccl")


def one_matrix(device, backend):
    """Train by Muon one matrix that is cut over tp, so that one of the ranks owns nothing."""
    dist.init_dist("pytorch", backend=backend, timeout=20)
    manager = setup_process_group_manager(tp_size=2)
    torch.manual_seed(0)
    model = parallelize(model_there(), manager, rehearse=False)
    (weight,) = (p for n, p in model.named_parameters() if n == MATRIX)
    muon = whole_matrices(torch.optim.Muon([weight], lr=0.1), model)
    batch = moved(default_batch(0), devices.current_device())
    train_step(model, shard_global_batch(batch, 1, model=model))
    muon.step()
    return full_state_dict(model, only=lambda name: name == MATRIX)[MATRIX].cpu()


def test_a_rank_that_owns_no_matrix_sends_from_the_same_device(plugins, monkeypatch):
    torch.manual_seed(0)
    model, batch = small_model(), default_batch(0)
    weight = model.get_parameter(MATRIX)
    mean_loss(model(batch["input_ids"]), batch["labels"]).backward()
    torch.optim.Muon([weight], lr=0.1).step()
    monkeypatch.syspath_prepend(plugins)
    for found in run_ranks(one_matrix, 2, "npu", "hccl", init=False, timeout=200):
        assert relative_error(found, weight) < 1e-5


def record_threads(device, backend):
    """Note which threads compute in a step, and which have entered the device."""
    dist.init_dist("pytorch", backend=backend, timeout=20)
    own, module = devices.current_device(), getattr(torch, device)
    computing, entered, choose = set(), {}, module.set_device

    def note(*_):
        computing.add(threading.get_ident())

    def entering(which):
        entered[threading.get_ident()] = which
        choose(which)

    with patch.object(module, "set_device", entering):
        model = DataParallelBucket(model_there(), group=torch.distributed.group.WORLD)
        for parameter in model.parameters():
            parameter.register_hook(note)
        batch = moved(dict(default_batch(0)), own)
        mean_loss(model(batch["input_ids"]), batch["labels"]).backward()
    assert len(computing) == 1
    assert entered == dict.fromkeys(computing, own)


def test_every_thread_that_computes_enters_the_device(plugins, monkeypatch):
    monkeypatch.syspath_prepend(plugins)
    run_ranks(record_threads, 2, "npu", "hccl", init=False, timeout=200)

"""Stand-ins for vendors' devices, whose backends refuse dtypes by the table."""

import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from small_models import small_mixture, small_model
from sweeps import today
from training import grid

import scaletorch.dist as dist
from scaletorch.bisect import bisect
from scaletorch.checkpoint import load, save
from scaletorch.compose import (
    clip_grad_norm_,
    eval_step,
    full_state_dict,
    global_grad_norm,
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

VENDORS = [("npu", "hccl"), ("mlu", "cncl"), ("musa", "mccl")]
# One of each axis and of what shards it otherwise, then two together.
PAIRS = [
    ("dp2", {}), ("dp2", {"data_parallel": ["zero1"]}), ("pp2", {}), ("cp2", {}),
    ("tp2", {"sequence_parallel": ["on"]}), ("dp2-ep2", {}),
]  # fmt: skip
FOURS = [
    ("dp2-tp2", {"sequence_parallel": ["on"]}), ("pp2-cp2", {}), ("dp2-pp2", {}), ("cp2-tp2", {}),
    ("dp2-cp2", {"data_parallel": ["zero2"]}), ("dp2-tp2-ep2", {}), ("pp2-tp2", {}),
    ("dp4-ep4", {}),
]  # fmt: skip

MATRIX = "layers.0.self_attn.q_proj.weight"

pytestmark = pytest.mark.timeout(900)  # the first test may build the stand-in


def model_of(layout):
    return small_mixture if "ep" in layout else small_model


def prove(device, cases):
    """Failures of the proof of each case."""
    for case, reference, model in cases:
        subject = Subject(locate(model), device=device)
        torch.manual_seed(0)  # as the reference was
        report = run_case(case, subject, reference)
        assert report.compared > 20
        yield f"{case}", report.failures


def train_and_save(layout, folder):
    """A step, its norms, an evaluation and a checkpoint there and back."""
    sizes = {f"{axis}_size": size for axis, size in asdict(parse_layout(layout)).items()}
    with grid(sizes) as manager:
        torch.manual_seed(0)
        model = parallelize(model_of(layout)().to(devices.current_device()), manager)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batch = moved(default_batch(0), devices.current_device())
        micro_batches = shard_global_batch(batch, 2, model=model)
        train_step(model, micro_batches)
        largest = global_grad_norm(model, manager, norm_type=float("inf"))
        norm = clip_grad_norm_(model, 1.0, manager)
        assert 0 < largest < norm
        optimizer.step()
        loss = eval_step(model, micro_batches)
        save(folder / layout, model, optimizer, step=1)
        assert load(folder / layout, model, optimizer).step == 1
        assert eval_step(model, micro_batches) == loss


def work(device, backend, cases, layouts, folder):
    assert dist.get_backend() == backend
    assert str(devices.current_device()) == f"{device}:{dist.get_rank()}"
    for layout in layouts:
        train_and_save(layout, folder)
    return dict(prove(device, cases))


def cases_of(axes, folder):
    """The cases of some axes, with their references of one process."""
    files = {
        model: save_reference(
            folder / model.__name__, Subject(locate(model)), default_batch, "float64"
        )
        for model in {model_of(layout) for layout, _ in axes}
    }
    for layout, options in axes:
        model = model_of(layout)
        for case in enumerate_cases([parse_layout(layout)], ["float64"], options):
            yield case, files[model], model


def run_axes(ranks, axes, vendor, folder):
    cases = list(cases_of(axes, folder))
    layouts = list(dict.fromkeys(layout for layout, _ in axes))
    given = (*vendor, cases, layouts, folder)
    answers = run_ranks(work, ranks, *given, backend=vendor[1], timeout=600)
    for found in answers:
        assert list(found.values()) == [[]] * len(axes), found


@pytest.mark.parametrize("vendor", today(VENDORS, 3), ids=lambda vendor: vendor[1])
def test_every_axis_and_two_together_train_like_one_process(plugins, monkeypatch, tmp_path, vendor):
    monkeypatch.syspath_prepend(plugins)
    run_axes(2, today(PAIRS, 2), vendor, tmp_path)
    run_axes(4, today(FOURS, 4), vendor, tmp_path)


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


def model_there():
    return small_model().to(devices.current_device())


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

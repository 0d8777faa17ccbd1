"""Tensors of an accelerator on a group of gloo, which are copied to the CPU and back."""

import importlib.util
from pathlib import Path

import pytest
import torch

import scaletorch.dist as dist
from scaletorch.dist.testing import run_ranks

PATH = Path(__file__).with_name("every_backend.py")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_every_body():
    spec = importlib.util.spec_from_file_location("every_backend", PATH)
    every_backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(every_backend)
    every_backend.run_all(torch.device("cuda", 0))
    objects = dist.all_gather_object(torch.tensor(dist.get_rank(), device="cuda:0"))
    assert [int(one) for one in objects] == [0, 1]


def test_tensors_of_a_gpu_on_gloo():
    run_ranks(run_every_body, 2, timeout=200)

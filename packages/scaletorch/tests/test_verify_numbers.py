"""The proof switches off what a device computes in fewer digits, says so, and puts it back."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import verify, where
from scaletorch.verify.precision import REDUCED, full_precision, in_words, model_precision
from scaletorch.verify.report import Report

SAID = "; TF32 and reductions in 16 bits off, deterministic algorithms off"


def settings():
    """Return all that may be changed; the newer names of TF32 can always be read."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    tf32 = [each.fp32_precision for each in (matmul, cudnn.conv, cudnn.rnn)]
    return [*tf32, *(getattr(matmul, name) for name in REDUCED)]


def switches(by):
    """Return the settings before, during and after, and what is told of them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if by == "old names":
        torch.set_float32_matmul_precision("high")
        cudnn.allow_tf32 = True
    elif by == "new names":
        for each in (matmul, cudnn.conv, cudnn.rnn):
            each.fp32_precision = "tf32"
    matmul.allow_bf16_reduced_precision_reduction = True
    before = settings()
    with full_precision("cuda") as told:
        during = settings()
    return before, during, settings(), told


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the old names of TF32 alone"
)
@pytest.mark.parametrize("by", ["default", "old names", "new names"])
def test_settings_are_off_for_a_while(by):
    ((before, during, after, told),) = run_ranks(switches, 1, by)
    assert before == after
    assert "tf32" in before
    assert before[3] is True
    assert "tf32" not in during
    assert during[3:] == [False] * len(REDUCED)
    assert not any(told.values())
    assert {"matmul.tf32", "cudnn.tf32", "deterministic"} <= told.keys()


def test_other_devices_have_no_settings():
    before = settings() if hasattr(torch.backends.cudnn, "conv") else None
    for device in ("cpu", "npu", "musa"):
        with full_precision(device) as told:
            assert told == {}
            assert before is None or settings() == before
    assert in_words({}) == ""


def test_a_cast_is_left_out_also_where_a_mode_hands_it_on():
    x = torch.ones(2, dtype=torch.float64)
    with model_precision(torch.float64), BaseTorchFunctionMode():
        assert F.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64


def test_a_report_says_how_the_device_computed():
    told = {"matmul.tf32": False, "deterministic": False}
    report = Report([], 1, where=where.Where("cuda", "nccl"), numbers=told)
    assert report.summary().endswith(SAID)
    assert json.loads(report.to_json())["numbers"] == told
    plain = verify(layouts=[Grid()], dtype="float64")
    assert plain.passed
    assert plain.numbers == {}
    assert "TF32" not in str(plain)
    assert json.loads(plain.to_json())["numbers"] == {}

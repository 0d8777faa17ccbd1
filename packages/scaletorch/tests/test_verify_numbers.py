"""The proof switches off what a device computes in fewer digits, and puts it back."""

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

from scaletorch.dist.testing import run_ranks
from scaletorch.verify.precision import REDUCED, full_precision, model_precision


def settings():
    """Return all that may be changed; the newer names of TF32 can always be read."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    tf32 = [each.fp32_precision for each in (matmul, cudnn.conv, cudnn.rnn)]
    return [*tf32, *(getattr(matmul, name) for name in REDUCED)]


def switches(by):
    """Return the settings before, during and after."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if by == "old names":
        torch.set_float32_matmul_precision("high")
        cudnn.allow_tf32 = True
    elif by == "new names":
        for each in (matmul, cudnn.conv, cudnn.rnn):
            each.fp32_precision = "tf32"
    matmul.allow_bf16_reduced_precision_reduction = True
    before = settings()
    with full_precision("cuda"):
        during = settings()
    return before, during, settings()


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the old names of TF32 alone"
)
@pytest.mark.parametrize("by", ["default", "old names", "new names"])
def test_settings_are_off_for_a_while(by):
    ((before, during, after),) = run_ranks(switches, 1, by)
    assert before == after
    assert "tf32" in before
    assert before[3] is True
    assert "tf32" not in during
    assert during[3:] == [False] * len(REDUCED)


def test_other_devices_have_no_settings():
    before = settings() if hasattr(torch.backends.cudnn, "conv") else None
    for device in ("cpu", "npu", "musa"):
        with full_precision(device):
            assert before is None or settings() == before


def test_a_cast_is_left_out_also_where_a_mode_hands_it_on():
    x = torch.ones(2, dtype=torch.float64)
    with model_precision(torch.float64), BaseTorchFunctionMode():
        assert F.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64

"""Runs that are right are reported nothing of, and all of their tensors are compared."""

import torch
import torch.nn.functional as F
from sound_runs import campaign
from torch.overrides import BaseTorchFunctionMode

from scaletorch.bisect.comparing.judge import GOOD
from scaletorch.verify.precision import model_precision

SEVERAL_STAGES, SHARES = 5, 10  # places in sound_runs.LAYOUTS


def test_nothing_is_reported_of_a_sound_run_and_everything_was_compared():
    for ran in campaign(["llama"], ["float64"], [SEVERAL_STAGES, SHARES], steps=1):
        assert ran.sound, f"{ran.case}: {ran.report}"
        assert ran.report.count(GOOD) == len(ran.report.judged) > 600, ran.case


def test_a_cast_is_left_out_also_where_a_mode_hands_it_on():
    x = torch.ones(2, dtype=torch.float64)
    with model_precision(torch.float64), BaseTorchFunctionMode():
        assert F.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64

"""bfloat16 is judged by what one process loses; devices and casts keep all digits meanwhile."""

import pytest
import torch
from small_models import SMALL_MIXTURE, small_mixture
from test_verify_experts import Leaning, leaning
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

from scaletorch.dist import get_rank
from scaletorch.dist.testing import run_ranks
from scaletorch.models.mixture import Experts
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import verify
from scaletorch.verify.differences import compare_number, compare_tensors, score_error
from scaletorch.verify.expert_choices import Choice
from scaletorch.verify.precision import REDUCED, full_precision, model_precision


class Faulty(Experts):
    """Experts of all ranks but the first return a quarter too much."""

    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights) * (1.25 if get_rank() else 1.0)


def faulty():
    model = small_mixture()
    for layer in model.layers:
        experts = Faulty(SMALL_MIXTURE)
        experts.load_state_dict(layer.mlp.experts.state_dict())
        layer.mlp.experts = experts
    return model


class Elsewhere(Leaning):
    """Rounding of scores decides, and on one rank otherwise."""

    lean = 1e-4


def elsewhere():
    return leaning(Elsewhere)


def test_layouts_lose_no_more_than_one_process():
    layouts = [Grid(dp=2, ep=2), Grid(tp=2, ep=2), Grid(pp=2), Grid(cp=2, ep=2)]
    report = verify(small_mixture, layouts=layouts, dtype="bfloat16")
    assert report.passed, report
    assert "1.25 x what one process loses" in report.summary()
    (result,) = verify(faulty, layouts=[Grid(dp=2, ep=2)], dtype="bfloat16").results
    assert result.failed, result.row()


def test_flips_are_named():
    report = verify(elsewhere, layouts=[Grid(dp=2)], dtype="bfloat16")
    assert report.passed, report
    assert report.results[0].replayed
    assert "experts chosen as in one process, where rounding chose others, in 1" in str(report)


def test_what_is_lost_is_of_all_tensors_together():
    exact = {"gradients": {"a": torch.ones(4).double(), "b": torch.ones(4).double()}}
    theirs = {"gradients": {n: (t + 0.01).bfloat16() for n, t in exact["gradients"].items()}}

    def compare(**ours):
        ours = theirs["gradients"] | ours
        return list(compare_tensors("gradient", 0, ours, theirs, 0.0, exact))

    (same,) = compare()
    assert not same.failed
    assert same.error * 1.25 == pytest.approx(same.bound)
    (worse,) = compare(a=torch.full((4,), 1.05).bfloat16())
    assert worse.failed
    assert compare(a=torch.ones(4))[0].error == float("inf")
    for true, ours, fails in ((2.0, 2.01, 0), (2.0, 2.1, 1), (0.0, 0.0, 0), (0.0, 0.1, 1)):
        exact = torch.tensor(true).double()
        pair = torch.tensor(ours), torch.tensor(true)
        assert compare_number("loss", 0, *pair, 0.0, {"loss": exact}).failed == fails


def test_scores_are_off_by_what_nearly_all_tokens_are():
    scores = torch.tensor([[1.0, 0.5]]).repeat(5, 1)
    near = scores + torch.tensor([[0.01], [0.01], [0.02], [0.02], [5.0]])
    pair = [[Choice(each, scores > 0.7)] for each in (near, scores.double())]
    assert score_error(*pair) == pytest.approx(0.08)
    assert score_error([], []) == 0


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

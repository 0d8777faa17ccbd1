"""bfloat16 is judged by what one process loses, and tokens that go elsewhere are named."""

import pytest
import torch
from small_models import SMALL_MIXTURE, small_mixture
from test_verify_experts import Leaning, leaning

from scaletorch.dist import get_rank
from scaletorch.models.mixture import Experts
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import verify
from scaletorch.verify.differences import compare_all, compare_number, score_error
from scaletorch.verify.expert_choices import Choice


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


def test_a_fault_shows_beside_rounding():
    (result,) = verify(faulty, layouts=[Grid(dp=2, ep=2)], dtype="bfloat16").results
    assert result.failed, result.row()


def test_flips_are_named():
    report = verify(elsewhere, layouts=[Grid(dp=2)], dtype="bfloat16")
    assert report.passed, report
    assert report.results[0].replayed
    assert "experts chosen as in one process, where rounding chose others, in 1 cases" in (
        report.summary()
    )


def test_what_is_lost_is_of_all_tensors_together():
    exact = {"gradients": {"a": torch.ones(4).double(), "b": torch.ones(4).double()}}
    theirs = {"gradients": {n: (t + 0.01).bfloat16() for n, t in exact["gradients"].items()}}
    (same,) = compare_all("gradient", 0, theirs["gradients"], theirs, 0.0, exact)
    assert not same.failed
    assert same.error * 1.25 == pytest.approx(same.bound)
    ours = {**theirs["gradients"], "a": torch.full((4,), 1.05).bfloat16()}
    (worse,) = compare_all("gradient", 0, ours, theirs, 0.0, exact)
    assert worse.failed
    (other,) = list(compare_all("gradient", 0, {"a": torch.ones(4)}, theirs, 0.0, exact))[:1]
    assert other.error == float("inf")
    numbers = {"loss": torch.tensor(2.0).double()}
    lucky = compare_number("loss", 0, torch.tensor(2.01), torch.tensor(2.0), 0.0, numbers)
    assert not lucky.failed
    assert compare_number("loss", 0, torch.tensor(2.1), torch.tensor(2.0), 0.0, numbers).failed


def test_scores_are_off_by_what_nearly_all_tokens_are():
    scores = torch.tensor([[1.0, 0.5]]).repeat(5, 1)
    near = scores + torch.tensor([[0.01], [0.01], [0.02], [0.02], [5.0]])
    chosen = scores > 0.7
    assert score_error([Choice(near, chosen)], [Choice(scores.double(), chosen)]) == pytest.approx(
        0.08
    )
    assert score_error([], []) == 0

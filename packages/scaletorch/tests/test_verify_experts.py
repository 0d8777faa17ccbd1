"""What the proof says of experts, of tokens that rounding sends elsewhere, and of bfloat16."""

import pytest
import torch
from small_models import SMALL_MIXTURE, small_mixture, small_model
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from scaletorch.compose.experts import count_experts
from scaletorch.dist import get_rank
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Mixture, MixtureConfig
from scaletorch.models.mixture import Experts, Router
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import every_layout, layout_name, parse_layout, verify
from scaletorch.verify.__main__ import main, parse, problem_of
from scaletorch.verify.cases import choose_layouts
from scaletorch.verify.differences import compare_number, compare_tensors
from scaletorch.verify.precision import REDUCED, full_precision, model_precision
from scaletorch.verify.problem import default_mixture, sharpened


def uneven():
    """Three experts, of which two ranks have two and one."""
    return sharpened(Mixture(MixtureConfig(64, 16, 8, 2, 4, 2, num_experts=3)))


class Leaning(Router):
    """Two experts have the same scores, but for a little that is a rank's own."""

    lean = 1e-7

    def forward(self, x):
        scores = nn.functional.linear(x, self.weight[[0, 1, 1, 3]]).float().softmax(-1)
        own = torch.tensor([0, 0, 1, 0]) * self.lean * get_rank()
        weights, index = torch.topk(scores + own.to(scores.dtype), self.top_k)
        return index, weights / weights.sum(-1, keepdim=True)


class Faulty(Leaning):
    lean = 1e-2


def leaning(kind=Leaning):
    model = small_mixture()
    for layer in model.layers:
        gate = kind(SMALL_MIXTURE)
        gate.weight = layer.mlp.gate.weight
        layer.mlp.gate = gate
    return model


def faulty():
    return leaning(Faulty)


def test_layouts_are_named_and_read():
    assert parse_layout("dp2-tp4") == Grid(dp=2, tp=4)
    assert parse_layout("2x1x1x2-ep4") == Grid(dp=2, tp=2, ep=4)
    assert parse_layout("tp2-dp2-ep2-etp2") == parse_layout("2x1x1x2-ep2-etp2")
    for text in ("2x1x1x2-ep4", "2x1x1x2-ep2-etp2", "2x1x1x2-etp1"):
        assert layout_name(parse_layout(text)) == text
    assert layout_name(parse_layout("2x1x1x2-ep2-etp1")) == "2x1x1x2-ep2"
    for text in ("2x2x2", "2x1x1x2-ep", "2x1x1x2-ep0", "2x1x1x2ep4", "2x1x1x2-ep4-ep4", "dp",
                 "dp2-dp2", "dp0", "2x1x1x2-tp4", "dp2 tp2", "xp2", ""):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="nor the same by name, such as dp2-tp2"):
            parse_layout(text)
    with pytest.raises(InvalidArgumentError, match="nearest legal ep sizes: 4, 2, 1"):
        parse_layout("2x1x1x2-ep3")


def test_every_size_that_folds_is_enumerated():
    names = [layout_name(grid) for grid in every_layout(2, (1, 2))]
    assert names == ["1x1x1x2", "1x1x1x2-etp1", "1x1x1x2-ep2", "1x1x2x1", "1x1x2x1-ep2", "1x2x1x1",
                     "2x1x1x1", "2x1x1x1-ep2"]  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="ep 3 folds no layout of 2 ranks"):
        every_layout(2, (3,))
    assert all(grid.ep == 1 for grid in every_layout(8))
    assert choose_layouts([Grid(dp=4)], None, [2, 4], experts=4) == [
        Grid(dp=4, ep=2), Grid(dp=4, ep=4),
    ]  # fmt: skip


def test_a_model_says_how_many_experts_it_has():
    assert count_experts(default_mixture()) == 8
    assert count_experts(small_model()) == 1
    assert count_experts(uneven(), {"layers.*.mlp.experts": "experts"}) == 3
    with pytest.raises(InvalidArgumentError, match="matches no module"):
        count_experts(default_mixture(), {"layers.*.mlp.expert": "experts"})


def test_all_layouts_of_two_ranks():
    report = verify(small_mixture, world_size=2, dtype="float64")
    assert report.passed, report
    assert len(report.results) == 8
    assert "2x1x1x1-ep2 float64" in str(report)


def test_uneven_experts_and_experts_cut_over_tp():
    report = verify(uneven, layouts=[Grid(dp=2, ep=2)], dtype="float64")
    assert report.passed, report
    layouts = [Grid(dp=2, tp=2, ep=2, etp=2), Grid(dp=2, tp=2, etp=1)]
    report = verify(small_mixture, layouts=layouts, dtype="float64")
    assert report.passed, report
    assert report.results[0].case.arguments.startswith("--layout 2x1x1x2-ep2-etp2 ")


def test_the_command_takes_the_built_in_mixture_where_ep_is_asked(capsys):
    def chosen(*arguments):
        parsed = parse(arguments)
        return problem_of(parsed, [parse_layout(t) for t in parsed.layout or ["2x1x1x1"]])

    assert chosen("--ep", "2")[0] is chosen("--ep")[0] is default_mixture
    assert chosen("--layout", "2x1x1x1-ep2")[0] is default_mixture
    assert chosen("--layout", "2x1x1x1")[0].__name__ == "default_model"
    assert main(["--layout", "2x1x1x1", "--ep", "4"]) == 2
    assert "nearest legal ep sizes" in capsys.readouterr().err


def test_experts_are_chosen_as_in_one_process_where_rounding_would_choose_others():
    report = verify(leaning, layouts=[Grid(dp=2)], dtype=["float32", "float64"])
    single, double = report.results
    assert single.passed, single.row()
    assert single.replayed
    assert "experts chosen as in one process, where rounding chose others, in 1" in str(report)
    assert double.failed
    assert not double.replayed
    assert verify(faulty, layouts=[Grid(dp=2)], dtype="float32").failures


class Excessive(Experts):
    """Experts of all ranks but the first return a quarter too much."""

    def forward(self, hidden, index, weights):
        return super().forward(hidden, index, weights) * (1.25 if get_rank() else 1.0)


def excessive():
    model = small_mixture()
    for layer in model.layers:
        experts = Excessive(SMALL_MIXTURE)
        experts.load_state_dict(layer.mlp.experts.state_dict())
        layer.mlp.experts = experts
    return model


def test_layouts_lose_no_more_than_one_process():
    layouts = [Grid(dp=2, ep=2), Grid(tp=2, ep=2), Grid(pp=2), Grid(cp=2, ep=2)]
    report = verify(small_mixture, layouts=layouts, dtype="bfloat16")
    assert report.passed, report
    assert "1.25 x what one process loses" in report.summary()
    (result,) = verify(excessive, layouts=[Grid(dp=2, ep=2)], dtype="bfloat16").results
    assert result.failed, result.row()


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


def test_a_cast_is_left_out_also_where_a_mode_hands_it_on():
    x = torch.ones(2, dtype=torch.float64)
    with model_precision(torch.float64), BaseTorchFunctionMode():
        assert nn.functional.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64

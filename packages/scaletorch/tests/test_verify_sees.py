"""What the proof must not let pass, on the batches and models that users have."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from mutants import specimen
from mutants.hunt import run_mutant
from mutants.patch import instead, patched
from small_models import SMALL, one_layer, small_model

from scaletorch.dist import get_rank
from scaletorch.dist.ranks.locate import locate
from scaletorch.models import Llama
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import default_batch, parse_layout, verify
from scaletorch.verify.__main__ import main
from scaletorch.verify.cases import Case
from scaletorch.verify.differences import LARGEST, Difference, blind, bound
from scaletorch.verify.dropout import judge, recorded
from scaletorch.verify.problem import STEPS, Subject, mean_loss
from scaletorch.verify.report import CaseResult, Report
from scaletorch.verify.runner import RankReport, run_case
from scaletorch.verify.verify import Task, run_all, save_reference


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("batch", [default_batch, specimen.batch])
def test_every_rank_counts_in_some_step_and_some_in_none(batch, dp):
    counts = torch.stack(
        [(batch(step)["labels"] != -100).view(dp, -1).sum(1) for step in range(STEPS)]
    )
    assert (counts > 0).any(0).all()
    assert (counts == 0).any()
    assert (counts > 0).any(1).all()


def idle(case, subject, reference, rank):
    """A data-parallel rank whose gradients are thrown away."""

    def thrown_away(all_reduce_flat, data, *args, **options):
        data.mul_(get_rank() != rank)
        return all_reduce_flat(data, *args, **options)

    with patched("parallel.data_parallel.buckets.bucket:all_reduce_flat", instead(thrown_away)):
        return run_case(case, subject, reference)


def test_an_idle_rank_fails(tmp_path):
    dp = 4
    case = Case(Grid(dp=dp), "float64")
    subject = Subject(locate(small_model))
    given = subject, save_reference(tmp_path / "reference", subject, default_batch, case.dtype)
    tasks = [Task(case, run_case, given), *(Task(case, idle, (*given, r)) for r in range(dp))]
    sound, *found = run_all(tasks, 60)
    assert sound.passed, sound.explanation("")
    assert all(result.ranks and result.failed for result in found)


def real_vocabulary():
    return Llama(replace(SMALL, vocab_size=50257, num_layers=1, num_heads=2))


@pytest.mark.parametrize(
    ("layout", "name"),
    [("2x1x1x1", "gradients-travel-in-bfloat16"), ("1x1x2x1", "statistics-in-bfloat16")],
)
def test_bfloat16_is_seen_in_float32_models_of_a_real_vocabulary(layout, name, tmp_path):
    batch = partial(default_batch, rows=4, length=8)
    case = Case(parse_layout(layout), "float32")
    subject = Subject(locate(real_vocabulary))
    given = subject, save_reference(tmp_path / "reference", subject, batch, case.dtype)
    sound, faulty = run_all([Task(case, run_mutant, (*given, each)) for each in (None, name)], 100)
    assert sound.passed, sound.explanation("")
    assert sound.worst.error < sound.worst.bound / 5
    assert faulty.ranks
    assert not faulty.passed
    assert faulty.worst.error > 3 * faulty.worst.bound


class Tall(Llama):
    """Its parameter of two million rows, which nobody uses, counts as additions."""

    def __init__(self):
        super().__init__(SMALL)
        self.spare = torch.nn.Parameter(torch.zeros(2_000_000, 1))


def test_a_dtype_that_would_hide_faults_is_not_judged():
    of_8_billion = 2_886_656  # additions in a Llama of so many parameters
    assert bound(torch.float32, of_8_billion, STEPS - 1) > LARGEST
    assert "verify float64" in blind(torch.float32, of_8_billion, STEPS)
    assert not blind(torch.float64, of_8_billion, STEPS)
    assert not blind(torch.float32, 965_632, STEPS)  # 1.5 billion
    report = verify(Tall, layouts=[Grid()])
    assert not report.passed
    double, single = report.results
    assert double.passed
    assert not single.ranks
    assert "1x1x1x1 float32: NOT JUDGED: rounding of 200" in str(report)
    assert "1 of 2 cases train like one process" in report.summary()


def test_the_oracles_loss_is_plain():
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [0, 2, -100]])
    losses = -logits.log_softmax(-1)
    expected = (losses[0, 0, 1] + losses[0, 2, 4] + losses[1, 0, 0] + losses[1, 1, 2]) / 4
    torch.testing.assert_close(mean_loss(logits, labels), expected)
    assert mean_loss(logits, torch.full((2, 3), -100)) == 0


def test_a_layout_that_is_refused_is_no_fault_and_no_pass(capsys):
    report = verify(one_layer, world_size=2, dtype="float64")
    (refused,) = report.refusals
    assert str(refused.case) == "1x2x1x1 float64"
    assert "1 layers cannot be spread over 2 stages" in refused.row()[-1]
    assert "\n" not in refused.refused
    assert "Traceback" not in str(report)
    assert report.passed
    assert "3 of 3 cases train like one process (1 refused)" in report.summary()
    words = ["--model", "small_models:one_layer", "--dtype", "float64", "--layout", "1x2x1x1"]
    assert main(words) == 2  # of one that is named
    printed = capsys.readouterr()
    (line,) = [each for each in printed.out.splitlines() if each.startswith("1x2x1x1")]
    assert "refused" in line
    assert "Traceback" not in printed.out + printed.err


class Convolved(Llama):
    def __init__(self):
        super().__init__(SMALL)

    def forward(self, input_ids, position_ids=None):
        logits = super().forward(input_ids, position_ids)
        return logits + torch.nn.functional.pad(logits, (0, 0, 1, 0))[:, :-1]


def test_what_mixes_positions_differs():
    report = verify(Convolved, layouts=[Grid(cp=2)], dtype="float64")
    (result,) = report.results
    assert not result.refused, str(report)
    assert not report.passed


class Fails(Llama):
    def __init__(self):
        super().__init__(SMALL)

    def forward(self, input_ids, position_ids=None):
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("no such file")
        return super().forward(input_ids, position_ids)


def test_ranks_that_fail_alike_show_one_traceback_and_the_next_case_runs():
    report = verify(Fails, layouts=[Grid(dp=4), Grid()], dtype="float64")
    failed, alone = report.results
    text = str(report)
    assert not failed.passed
    assert alone.passed
    assert text.count("ValueError: no such file") == 1
    assert "--- ranks 0-3 failed ---" in text


def dropped_twice(share, size, *, alike):
    """Return what is found where a module drops of two inputs, from one seed or from two."""
    model = torch.nn.Sequential(torch.nn.Dropout(share))
    with recorded(model, (0, 0)) as draws:
        for seed in range(2):
            given = torch.full((size,), 1.0 + seed)
            torch.manual_seed(0 if alike else seed)
            model(given)
    (found,) = judge(draws, 0)
    return found.note


def test_dropout_that_drops_next_to_nothing_is_not_taken_for_the_same_draw():
    assert "must be independent" in dropped_twice(0.5, 100, alike=True)
    assert not dropped_twice(0.5, 100, alike=False)
    assert not dropped_twice(1e-9, 100, alike=False)
    assert not dropped_twice(0.5, 2, alike=True)


def test_a_difference_that_is_no_number_is_the_most_severe():
    bad = Difference("loss", 0, float("nan"), float("nan"), note="a | b")
    report = Report([CaseResult(Case(Grid()), 0.0, [RankReport(1, bad, [bad])])], 1)
    assert bad.severity == torch.inf
    assert "relative error nan, bound nan; a | b" in str(report)

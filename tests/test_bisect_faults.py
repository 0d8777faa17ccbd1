"""Faults in others' programs are told, each in words that fit, on layouts of four ranks."""

import pytest
import torch
from tests.bisect_faults import CASES, FAULTS, LAYOUTS, MIXED, mixed, step, train_all
from torch import nn

from scaletorch.bisect import compare, record
from scaletorch.bisect.__main__ import main
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import preload, run_ranks

preload(
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "scaletorch.bisect",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    plain = step(folder / "one")
    mixed(folder / "mixed-one")
    return folder, plain, run_ranks(train_all, 4, folder, timeout=300)


def require(report, direction, module, tensor, words):
    """Compare what is said of the first fault."""
    birth, how = report.found[0].birth, "; ".join(report.found[0].how)
    assert birth.direction == direction, report
    assert module in birth.modules or not module, report
    assert birth.judged.key.name == tensor, report
    assert words in how, report


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_right_programs_are_right_and_completely_compared(runs, layout):
    folder, plain, ranks = runs
    for found in ranks:
        for name, gradient in plain.items():
            torch.testing.assert_close(found[layout, ""][name], gradient, rtol=1e-12, atol=1e-14)
    report = compare(folder / "one", folder / f"{layout}")
    assert report.sound, report
    assert not report.count("unseen"), report


@pytest.mark.parametrize(("fault", "layout"), CASES, ids=str)
def test_a_fault_is_told_in_words_that_fit(runs, fault, layout):
    folder, *_ = runs
    require(compare(folder / "one", folder / f"{layout}{fault}"), *FAULTS[fault])


def test_masked_scores_side_outputs_and_teachers_are_right(runs):
    folder, *_ = runs
    report = compare(folder / "mixed-one", folder / "mixed")
    assert report.sound, report
    assert not report.count("unseen"), report
    assert any("under no_grad" in str(key) for key in report.judged)


@pytest.mark.parametrize("fault", MIXED)
def test_what_masks_on_purpose_is_not_blamed(runs, fault):
    folder, *_ = runs
    require(compare(folder / "mixed-one", folder / f"mixed{fault}"), *MIXED[fault])


def small_step(folder, *, frozen=False, learns=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].weight.requires_grad_(not frozen)
    with record(folder, model) as tape:
        loss = model(torch.ones(2, 4).double()).square().sum()
        if learns:
            loss.backward()
        tape.put("loss", loss)


def test_a_gradient_that_the_reference_has_not_is_wrong(tmp_path):
    small_step(tmp_path / "one", frozen=True)
    small_step(tmp_path / "two")
    report = compare(tmp_path / "one", tmp_path / "two")
    assert [f.birth.judged.key.name for f in report.found] == ["1.weight"]
    assert "the reference has no gradient of it" in str(report)


def test_without_gradients_nothing_is_judged(tmp_path, capsys):
    for name in ("one", "two"):
        small_step(tmp_path / name, learns=False)
    assert not compare(tmp_path / "one", tmp_path / "two").sound
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 3
    said = "not judged, 1 of the training's results: no gradient"
    assert capsys.readouterr().out.startswith(said)
    with (
        pytest.raises(InvalidArgumentError, match=r"put takes \"loss\" or \"norm\", not 'other'"),
        record(tmp_path / "three") as tape,
    ):
        tape.put("other", torch.ones(()))


def test_a_loss_of_zero_is_right_where_both_are(tmp_path):
    for name, factor in (("one", 1.0), ("two", 2.0)):
        torch.manual_seed(0)
        model, described = nn.Sequential(nn.Linear(4, 4)).double(), {"rows": (range(2), 2)}
        with record(tmp_path / name, model, describe=described if factor > 1 else None) as tape:
            total = model(torch.ones(2, 4).double()).sum()
            loss = total - total.detach()
            (factor * loss).backward()
            for parameter in model.parameters():
                parameter.grad /= factor
            tape.put("loss", loss)
    report = compare(tmp_path / "one", tmp_path / "two")
    assert report.sound
    assert not report.count("bad")  # the factor of all activations' gradients is inferred


class Narrow(nn.Module):
    """Casts for precision, as norms do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        narrow = self.first(x).float()
        self.dtype = narrow.dtype
        return (narrow / narrow.norm()).to(x.dtype)


def test_casts_are_left_out_where_all_weights_are_float64(tmp_path):
    for name, dtype in (("wide", torch.float64), ("mixed", torch.float32)):
        model = nn.Sequential(Narrow().double(), nn.Linear(4, 4)).to(torch.float64)
        if name == "mixed":
            model[1].float()
        with record(tmp_path / name, model[0] if name == "wide" else model):
            model[0](torch.randn(2, 4).double())
        assert model[0].dtype == dtype

"""The proof, the search for a fault, and descriptions: of batches and losses of one's own."""

import pytest
import torch
from sweeps import today
from test_any_batch import (
    PLAN,
    POSITIONS,
    Denoiser,
    Fourier,
    Recurrent,
    of_class,
    of_curve,
    of_noise,
)

from scaletorch.bisect import bisect
from scaletorch.plan import Cut, describe
from scaletorch.verify import assert_trains_alike
from scaletorch.verify.__main__ import main
from scaletorch.verify.device import placed
from scaletorch.verify.differences import compare_tensor

DENOISING = {"plan": PLAN, "sequence_dims": POSITIONS, "loss_fn": of_noise}


def noises(step):
    """Return a batch in float32, as loaders give it."""
    generator = torch.Generator().manual_seed(step)
    latents, noise = torch.randn(2, 8, 8, 4, generator=generator)
    return {"latents": latents, "time": torch.rand(8, generator=generator), "loss_noise": noise}


def series(step):
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(5, (8,), generator=generator)
    return {"series": torch.randn(8, 3, 7, generator=generator), "labels": labels}


class Counting(Denoiser):
    """Its third block counts its positions, which cp divides."""

    def __init__(self):
        super().__init__()
        self.blocks[2].mlp.register_forward_hook(lambda _, __, y: y * y.shape[1] / 8)


def test_the_proof_takes_any_batch():
    layouts = today(["cp2-dp2", "tp2-pp2"], 2)
    report = assert_trains_alike(Denoiser, noises, layouts, dtype="float32", **DENOISING)
    assert len(report.results) == 1
    assert_trains_alike(Recurrent, series, "dp2", loss_fn=of_class)


def curves(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 12, 3, generator=generator),
        "loss_y": torch.randn(8, 12, 1, generator=generator),
    }


def test_complex_weights_stay_complex():
    report = assert_trains_alike(Fourier, curves, "dp2-pp2", loss_fn=of_curve)
    assert len(report.results) == 1
    found = placed(Fourier(), "cpu", torch.float32).layers[0].weight
    assert found.dtype == torch.complex64
    off = torch.complex(found.real.detach(), found.imag.detach() * 1.001)
    assert compare_tensor("weight", 0, off, found.detach(), 1e-6).failed
    assert bisect(Fourier, curves, layout="dp2-pp2", steps=1, loss_fn=of_curve).sound


def test_the_proof_sees_what_counts_positions():
    with pytest.raises(AssertionError, match=r"gradient|loss") as failed:
        assert_trains_alike(Counting, noises, "cp2", **DENOISING)
    told = "--loss test_any_batch:of_noise"
    assert told in str(failed.value)
    assert "--sequence-dims latents=1 loss_noise=1" in str(failed.value)


@pytest.mark.parametrize("layout", today(["dp2-cp2", "cp2-tp2", "cp4"], 3))
def test_a_fault_is_placed(layout):
    report = bisect(Counting, noises, layout=layout, steps=1, **DENOISING)
    assert not report.sound
    assert "blocks.2" in str(report).partition("\n\n")[0]


def test_right_runs_are_sound():
    told = {"options": {"sequence_parallel": "on"}}
    assert bisect(Denoiser, noises, layout="dp2-tp2", steps=1, **told, **DENOISING).sound


def test_the_command_takes_a_loss(capsys, monkeypatch):
    monkeypatch.chdir(__file__.rpartition("/")[0])
    named = ["--model", "test_any_batch:Recurrent", "--batch", "test_other_tasks:series"]
    words = ["--layout", "dp2", "--dtype", "float64", *named]
    assert main([*words, "--loss", "test_any_batch:of_class"]) == 0
    assert "1 of 1 cases train like one process" in capsys.readouterr().out


def of_rows(rows):
    return {name: entry[:1].expand(rows, *entry.shape[1:]) for name, entry in noises(0).items()}


def test_descriptions_take_a_loss():
    cuts = [Cut(tp=2), Cut(cp=2, cp_method="ring")]
    found = describe(Denoiser, 8, batch=of_rows, cuts=cuts, **DENOISING)
    assert not found.refused
    assert {*found.cuts} == {Cut(), *cuts}

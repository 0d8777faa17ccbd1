"""`verify --optimizer` trains with any optimizer, and says what cannot be."""

from __future__ import annotations

import pytest
import torch

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import Grid
from scaletorch.verify import verify
from scaletorch.verify.__main__ import optimizer_of, parse, read_argument


def small_model():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4}
    return Llama(LlamaConfig(**sizes, num_layers=2, num_kv_heads=2))


def half_step(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr / 2)


class GlobalNorm(torch.optim.SGD):
    """Divides by the norm of all gradients that it has."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


def test_an_optimizer_that_is_named():
    options = {"data_parallel": ["buckets", "zero2"]}
    layouts = [Grid(tp=2), Grid(dp=2), Grid(pp=2)]
    for optimizer, given in (
        (torch.optim.Muon, {"lr": 0.02}), (torch.optim.Adafactor, {}), (half_step, {"lr": 0.2}),
    ):  # fmt: skip
        report = verify(
            small_model, layouts=layouts, dtype="float64", options=options,
            optimizer=optimizer, optimizer_args=given,
        )  # fmt: skip
        assert report.passed, report
    report = verify(small_model, layouts=[Grid(tp=2), Grid(pp=2)], dtype="float64",
                    optimizer=GlobalNorm)  # fmt: skip
    assert all("GlobalNorm looks at several" in result.refused for result in report.results)


def test_optimizers_of_the_command_line():
    assert optimizer_of(parse(["--optimizer", "Muon"])) is torch.optim.Muon
    assert optimizer_of(parse(["--optimizer", "torch.optim:SGD"])) is torch.optim.SGD
    assert optimizer_of(parse([])) is None
    with pytest.raises(InvalidArgumentError, match=r"'torch\.optim:Moun' is not package"):
        optimizer_of(parse(["--optimizer", "Moun"]))
    read = [read_argument(text) for text in ("lr=0.02", "adjust_lr_fn=match_rms_adamw", "a=(1, 2)")]
    assert read == [("lr", 0.02), ("adjust_lr_fn", "match_rms_adamw"), ("a", (1, 2))]

"""Small models trained on a layout, compared with one process without this library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist.testing import relative_error, worst
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.data_parallel import DataParallelBucket, shard_optimizer
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

from .checks import Checks, Found
from .ranks import on_ranks

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 8, "num_kv_heads": 4}
BOUND = 1e-5  # relative error of float32 losses


@dataclass(frozen=True)
class Problem:
    """A model, its data and a layout.

    Attributes:
        sizes: Sizes of the grid, as arguments of `setup_process_group_manager`.
        config: Configuration of the Llama; with `num_experts`, of the mixture.
        options: Options of `parallelize`.
        zero: Stage of ZeRO, 0 for none.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    options: Mapping[str, Any] = field(default_factory=dict)
    zero: int = 0
    rows: int = 8
    length: int = 32
    micro_batches: int = 2
    dtype: str = "float32"
    steps: int = 2

    @property
    def world_size(self) -> int:
        """The number of ranks of the layout; ep ranks are among those of the other axes."""
        return math.prod(size for name, size in self.sizes.items() if name != "ep_size")


def build(problem: Problem, device: str) -> nn.Module:
    """Return the plain model on the device, the same on every rank."""
    torch.manual_seed(0)
    config = config_of(problem)
    with torch.device(device):
        model = Mixture(config) if isinstance(config, MixtureConfig) else Llama(config)
    return model.to(getattr(torch, problem.dtype))


def config_of(problem: Problem) -> LlamaConfig:
    """Return the model's configuration."""
    kind = MixtureConfig if "num_experts" in problem.config else LlamaConfig
    return kind(**problem.config)


def batch(problem: Problem, number: int, device: str) -> dict[str, Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(number)
    shape = (problem.rows, problem.length + 1)
    tokens = torch.randint(config_of(problem).vocab_size, shape, generator=generator).to(device)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


def loss_of(model: nn.Module, some: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the token losses."""
    logits = model(some["input_ids"]).float().flatten(0, 1)
    return F.cross_entropy(logits, some["labels"].flatten(), reduction="sum")


def plain_losses(problem: Problem, device: str) -> list[float]:
    """Return the losses of a plain PyTorch loop."""
    model, losses = build(problem, device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(problem.steps):
        loss = loss_of(model, batch(problem, number, device)) / (problem.rows * problem.length)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_grid(
    problem: Problem, device: str, manager: ProcessGroupManager, compiled: bool = False
) -> DataParallelBucket:
    """Return the model on the grid."""
    model = build(problem, device)
    for layer in getattr(model, "layers", ()) if compiled else ():
        layer.compile()
    return parallelize(model, manager, **problem.options)


def stepping(
    problem: Problem,
    device: str,
    model: DataParallelBucket,
    optimizer: torch.optim.Optimizer,
) -> Callable[[int], Tensor]:
    """Return a function that runs one step and returns its loss."""
    if problem.zero:
        shard_optimizer(optimizer, model, stage=problem.zero, overlap=True)

    def step(number: int) -> Tensor:
        whole = batch(problem, number, device)
        loss = train_step(model, shard_global_batch(whole, problem.micro_batches, model=model))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def losses_on_grid(device: str, problem: Problem) -> list[float]:
    """Train on this rank of the grid; return the losses."""
    manager = setup_process_group_manager(**problem.sizes)
    try:
        model = on_grid(problem, device, manager)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = stepping(problem, device, model, optimizer)
        return [step(number).item() for number in range(problem.steps)]
    finally:
        destroy_process_group_manager()


def compare(
    checks: Checks, problem: Problem, body: Callable[..., Any] = losses_on_grid, **how: Any
) -> Found:
    """Train on ranks and in one process; return the error of the losses."""
    exact = torch.tensor(plain_losses(problem, checks.device))
    every = on_ranks(checks, body, problem.world_size, problem, **how)
    return Found(worst(relative_error(torch.tensor(mine), exact) for mine in every), BOUND)


AXES = {
    "tp": Problem({"tp_size": 2}),
    "tp, sequence parallel": Problem({"tp_size": 2}, options={"sequence_parallel": True}),
    "cp": Problem({"cp_size": 2}),
    "pp": Problem({"pp_size": 2}),
    "dp": Problem({"dp_size": 2}),
    "dp, zero 2": Problem({"dp_size": 2}, zero=2),
    "tp x pp": Problem({"tp_size": 2, "pp_size": 2}),
    "ep": Problem({"dp_size": 2, "ep_size": 2}, {**SMALL, "num_experts": 4}),
}


def rehearsals(checks: Checks) -> None:
    """Train on every axis with the rehearsal, which is on by default."""
    for name, problem in list(AXES.items())[: 1 if checks.quick else None]:
        checks.run(name, compare, checks, problem)


def messages(checks: Checks) -> None:
    """Train pipelines with messages of 1 KB and of 8 MB, with small weights."""
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "num_kv_heads": 2}
    wide = {"hidden_size": 1024, "intermediate_size": 64, "num_heads": 8, "num_kv_heads": 2}
    small = Problem(config=tiny, rows=4, length=8, micro_batches=4)
    large = replace(small, config=wide, length=64 if checks.quick else 2048)
    for stages in (2,) if checks.quick else (2, 4):
        for size, base in (("1 KB", small), ("8 MB", large)):
            for schedule in ("1f1b",) if checks.quick else ("1f1b", "interleaved_1f1b", "zb_v"):
                config = {**base.config, "num_layers": 2 * stages}
                problem = replace(
                    base, sizes={"pp_size": stages}, config=config, options={"schedule": schedule}
                )
                name = f"{stages} stages, {size}, {schedule}"
                checks.run(name, compare, checks, problem)

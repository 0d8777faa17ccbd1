"""Measurement plans, and the check that all ways compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scaletorch.dist.testing import worst

from .models import Size, Transformer, make_batches, shared_copy
from .trainer import Trainer, Way
from .ways import ALONE, TABLES

Tensors = Mapping[str, Tensor]
BOUND = 1e-5
# Autocast computes norms in float32: its gradients are off the exact sum by 2e-2, with few tokens
# by 2e-1, and its parameters by 2e-4. A wrong factor of 2 would be more than the bounds.
BFLOAT16_BOUNDS = {"mixed": 0.3, "mixed training": 2e-3}


@dataclass(frozen=True)
class Plan:
    """A measurement.

    Attributes:
        table: Name of the table of ways.
        size: Size of the model.
        repeats: Steps of each way.
        recorded: Steps in which communication is recorded.
        burst: Consecutive steps that are timed as one, since a step may end during the next.
    """

    table: str
    size: Size
    repeats: int
    recorded: int = 0
    burst: int = 1

    @property
    def ways(self) -> dict[str, Way]:
        """The ways by name."""
        return TABLES[self.table]

    @property
    def trains(self) -> bool:
        """True if an optimizer changes the parameters."""
        return "training" in self.table


def errors(plan: Plan, model: Transformer, ways: Mapping[str, Trainer]) -> dict[str, float]:
    """Run two steps of every way; return the error of each."""
    batches = make_batches(plan.size, dist.get_rank())
    for way in ways.values():
        way.step(batches)
        way.step(batches)
    results = {
        name: way.parameters() if plan.trains else way.gradients() for name, way in ways.items()
    }
    del results[ALONE]
    first, *_ = results.values()
    expected = exact_gradients(plan.size, model) if plan.table == "mixed" else first
    found = {name: difference(result, expected) for name, result in results.items()}
    bound = BFLOAT16_BOUNDS.get(plan.table, BOUND)
    if worst(found.values()) > bound:
        raise SystemExit(f"results differ by more than {bound}: {found}")
    return found


def exact_gradients(size: Size, model: Transformer) -> Tensors:
    """Return the mean of the gradients of all micro-batches and ranks, summed in float64."""
    model = shared_copy(model)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for batch in make_batches(size, dist.get_rank()):
        model.zero_grad()
        (model(*batch) / size.micro_batches).backward()
        for name, parameter in model.named_parameters():
            sums[name] += torch.as_tensor(parameter.grad)
    for value in sums.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return sums


def difference(found: Tensors, expected: Tensors) -> float:
    """Return the largest relative difference of any tensor; infinite if one is missing."""
    if found.keys() != expected.keys() or any(value is None for value in found.values()):
        return float("inf")
    return worst(
        float((found[name] - value).norm() / value.norm()) for name, value in expected.items()
    )

"""Training in one process and on ranks, and the differences between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaletorch.compose import full_gradients, full_state_dict
from scaletorch.dist.testing import relative_error


class Figures(NamedTuple):
    """One process's results: losses and gradients of each step, and the final weights."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[Callable[[], Tensor]]
) -> Figures:
    """Train a plain model; each step makes forward and backward, and returns the loss."""
    found = Figures([], [], {})
    for step in steps:
        optimizer.zero_grad()
        found.losses.append(step().detach())
        named = model.named_parameters()
        found.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        optimizer.step()
    return found._replace(weights={n: w.clone() for n, w in model.state_dict().items()})


def gaps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Callable[[], Tensor]],
    expected: Figures,
) -> list[tuple[float, str]]:
    """Train a parallelized model in such steps; return the gaps of losses, gradients, weights."""
    found: list[tuple[float, str]] = []
    for step, loss, gradients in zip(steps, expected.losses, expected.gradients, strict=True):
        optimizer.zero_grad()
        found.append(gap({"loss": step()}, {"loss": loss}))
        found.append(gap(full_gradients(model), gradients))
        optimizer.step()
    return [*found, gap(full_state_dict(model), expected.weights)]


def gap(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of all tensors, and the name of its tensor.

    An error is relative to the tensor's own largest value, or to 1e-4 of the largest value of all
    if that is more: some gradients are only rounding errors.
    """
    floor = 1e-4 * max((t.abs().max() for t in expected.values() if _real(t)), default=0.0)
    worst = (0.0, "")
    for name, tensor in expected.items():
        if not _real(tensor):
            continue
        scale = torch.as_tensor(max(tensor.abs().max(), floor))
        given = found.get(name)
        if given is None or given.shape != tensor.shape:
            error = float("inf") if tensor.abs().max() > floor * 1e-3 else 0.0
        else:
            error = relative_error(given, tensor, scale=scale)
        worst = max(worst, (error, name))
    return worst


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0

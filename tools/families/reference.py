"""The reference, one float64 process: losses, all gradients of two steps, and the final weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from exactly import Exact
from torch import Tensor, nn

from ..gaps import Figures, train_alone
from .names import plain_model
from .tiny import LENGTH, VOCABULARY

STEPS, ROWS = 2, 4
LARGEST = 4_000_000  # parameters: a family with more has size fields that `tiny` does not know


def build(name: str) -> nn.Module:
    """Return a family's model in float64, the same on every rank, with weights that all matter."""
    torch.manual_seed(1)
    model = plain_model(name).double()
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise ValueError(f"its tiny model has {count:,} parameters")
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts("eager")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2, generator=generator)
            else:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise, alpha=0.1)
    return model.train()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer of every run.

    Some gradients are only rounding errors (those of keys' biases); a small eps would turn them
    into updates.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def batch(step: int) -> dict[str, Tensor]:
    """Return a global batch; its rows differ in the number of labels."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (ROWS, LENGTH)
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    labels = torch.randint(3, VOCABULARY, shape, generator=generator)
    for row in range(ROWS):
        labels[row, LENGTH - 1 - 3 * ((row + step) % ROWS) :] = -100
    return {"input_ids": ids, "labels": labels}


def refer(name: str) -> tuple[Figures, bool]:
    """Train a family's model in this process; return also whether it has routed experts."""
    model = build(name)
    optimizer = adam(model.parameters())

    def step(number: int) -> Tensor:
        whole = batch(number)
        with Exact():
            logits = model(input_ids=whole["input_ids"]).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
            loss.backward()
        return loss

    found = train_alone(model, optimizer, (partial(step, number) for number in range(STEPS)))
    if not all(map(torch.isfinite, found.losses)):
        raise ValueError(f"its losses are {[loss.item() for loss in found.losses]}")
    has_experts = any(n.endswith("experts") and "shared" not in n for n, _ in model.named_modules())
    return found, has_experts

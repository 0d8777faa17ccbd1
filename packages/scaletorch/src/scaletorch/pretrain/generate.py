"""Text drawn from a trained model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..dist.errors import InvalidArgumentError
from .saved import Trained


@torch.no_grad()
def generate(
    trained: Trained, prompt: str, *, tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """Return a prompt and what the model goes on with.

    Args:
        trained: The model.
        prompt: At least one token.
        tokens: How many to draw; each sees as many before it as a sequence of the training has.
        temperature: The logits are divided by it; 0 takes the likeliest token.
        seed: Of the draws; nothing else is drawn from.

    Raises:
        InvalidArgumentError: No token, or numbers that cannot be.
    """
    if not (math.isfinite(temperature) and temperature >= 0) or tokens < 1:
        raise InvalidArgumentError(
            f"tokens must be at least 1 and temperature at least 0, got {tokens}, {temperature}"
        )
    ids = trained.encode(prompt)
    if not len(ids):
        raise InvalidArgumentError("a prompt needs at least one token to go on from")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits = trained.model(ids[None, -trained.seq_len :])[0, -1]
        ids = torch.cat((ids, _draw(logits, temperature, generator)))
    return trained.decode(ids)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return one token, [1]."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    shares = (logits.double() / temperature).softmax(-1)
    return torch.multinomial(shares, 1, generator=generator)

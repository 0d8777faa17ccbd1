"""Batches, and losses as people write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletorch.compose import token_losses

from .model import VOCAB

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, Any]]
ROWS, LENGTHS = 8, (16, 12, 16, 12, 11)


def batch(seed: int, step: int) -> dict[str, Tensor]:
    """Return a global batch; its rows differ in the number of labels."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    length = LENGTHS[seed % len(LENGTHS)]
    tokens = torch.randint(VOCAB, (ROWS, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, length - (row + step) % 5 :] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def _tokens(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return the loss of each token, [B, L]."""
    return F.cross_entropy(logits.mT, labels, reduction="none", **options)


def _sequences(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss with equal weight for every sequence, regardless of its number of labels."""
    return (_tokens(logits, labels).sum(1) / (labels != -100).sum(1).clamp(min=1)).sum()


# Terms added to the cross entropy of tokens.
_TERMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "z_loss": lambda logits, labels: 0.01 * logits.logsumexp(-1).square(),
    "rolled": lambda logits, labels: 0.5 * _tokens(logits, labels.roll(1, 1)),
    "pairs": lambda logits, labels: 0.1 * F.cosine_similarity(logits, logits.roll(1, 0), -1),
}


def count_of(form: str) -> Callable[[Batch], Any] | None:
    """Return the count function of a loss, or None if it counts labels."""
    return (lambda micro_batch: len(micro_batch["labels"])) if form == "sequences" else None


def loss_of(form: str, model: nn.Module, *, whole: bool = False) -> Loss:
    """Return a loss function for a plain, unsharded model.

    Args:
        form: Form of the loss.
        model: Model whose parameters it may read.
        whole: Whether to write it for one process, without `token_losses`.
    """
    read = [p for p in model.parameters() if form == "penalty" or p.ndim > 1]
    read = {"penalty": read, "reads": read[-1:]}.get(form, [])  # all, or the head's weight

    def loss_fn(output: Any, micro_batch: Batch) -> tuple[Tensor, Any]:
        logits, labels = getattr(output, "logits", output), micro_batch["labels"]
        counts = labels != -100
        if form == "sequences":
            return _sequences(logits, labels), len(labels)
        if form == "smoothing" and whole:
            return _tokens(logits, labels, label_smoothing=0.1).sum(), counts.sum()
        if form == "smoothing":
            return token_losses(output, micro_batch, label_smoothing=0.1).sum(), counts.sum()
        total = _tokens(logits, labels).sum()
        if form in _TERMS:
            total = total + (_TERMS[form](logits, labels) * counts).sum()
        for parameter in read:
            total = total + parameter.square().sum() * 0.01 * counts.sum()
        return total, counts.sum()

    return loss_fn

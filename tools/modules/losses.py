"""Batches, and losses as people write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletorch.compose import token_losses

from .model import VOCAB

Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Any]]
ROWS, LENGTHS = 8, (16, 12, 16, 12, 11)


def batch(seed: int, step: int) -> dict[str, Tensor]:
    """Return a global batch: rows of which each has another number of labels."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    length = LENGTHS[seed % len(LENGTHS)]
    tokens = torch.randint(VOCAB, (ROWS, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, length - (row + step) % 5 :] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def _count(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def _logits(output: Any) -> Any:
    return getattr(output, "logits", output)


def _tokens(output: Any, labels: Tensor, **options: Any) -> Tensor:
    """Return the loss of each token, [B, L]."""
    options = {"reduction": "none", **options}
    return F.cross_entropy(_logits(output).mT, labels, **options)


def _smoothing(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute it by the library's own function, which one process has not."""
    labels = micro_batch["labels"]
    if type(micro_batch) is dict:
        return _tokens(output, labels, label_smoothing=0.1).sum(), _count(labels)
    return token_losses(output, micro_batch, label_smoothing=0.1).sum(), _count(labels)


def _z_loss(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = micro_batch["labels"]
    z = _logits(output).logsumexp(-1).square() * (labels != -100)
    return _tokens(output, labels).sum() + 0.01 * z.sum(), _count(labels)


def _by_hand(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = micro_batch["labels"]
    return _tokens(output, labels).sum(), _count(labels)


def _sequences(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weigh every sequence alike, however many labels it has."""
    labels = micro_batch["labels"]
    means = _tokens(output, labels).sum(1) / (labels != -100).sum(1).clamp(min=1)
    return means.sum(), torch.tensor(len(labels))


def _rolled(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Also predict the token before."""
    labels = micro_batch["labels"]
    before = _tokens(output, labels.roll(1, 1)) * (labels != -100)
    return _tokens(output, labels).sum() + 0.5 * before.sum(), _count(labels)


def _pairs(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows should differ from their neighbours."""
    logits, labels = _logits(output), micro_batch["labels"]
    near = F.cosine_similarity(logits, logits.roll(1, 0), dim=-1)
    return (_tokens(output, labels) + 0.1 * near * (labels != -100)).sum(), _count(labels)


def count_of(form: str) -> Callable[[Mapping[str, Tensor]], Any] | None:
    """Return a loss's count, where it is not that of labels."""
    return (lambda micro_batch: len(micro_batch["labels"])) if form == "sequences" else None


def loss_of(form: str, model: nn.Module) -> Loss | None:
    """Return a loss of a plain model that is still whole; None is cross entropy of tokens."""
    known = {
        "smoothing": _smoothing, "z_loss": _z_loss, "by_hand": _by_hand, "sequences": _sequences,
        "rolled": _rolled, "pairs": _pairs,
    }  # fmt: skip
    if form not in ("penalty", "reads"):
        return known.get(form)
    own = [p for p in model.parameters() if p.ndim > 1 or form == "penalty"]
    own = own if form == "penalty" else own[-1:]  # the head's

    def penalised(output: Any, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = _by_hand(output, micro_batch)
        return total + torch.stack([p.square().sum() for p in own]).sum() * 0.01 * count, count

    return penalised


def plain_loss(form: str, model: nn.Module) -> Loss:
    """Return the same for one process."""
    return loss_of(form, model) or _by_hand

"""The problem that all layouts must solve alike: a model, batches, and one process's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compose import token_loss_sum
from ..models import Llama, LlamaConfig
from . import dropout
from .precision import model_precision

Batch = Mapping[str, Tensor]
ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Batch]

SGD_STEPS = 2
LEARNING_RATE = 0.1
ADAM_EPS = 1e-2  # large: a small one turns rounding of tiny gradients into whole steps
MAX_NORM = 1.0
TORCH_DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Step:
    """What one process has after a step's backward, and after its optimizer.

    Attributes:
        loss: global loss, 0-d.
        norm: 2-norm of the whole gradient, 0-d.
        gradients: by plain names; shared parameters under each of theirs.
        weights: ``state_dict`` after the optimizer's step.
    """

    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def default_model() -> nn.Module:
    """Return a small Llama that splits up to 8 ways on each axis; grouped heads, tied head."""
    return sharpened(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=8, num_heads=16,
            num_kv_heads=8, tie_embeddings=True,
        )
    )  # fmt: skip


def wide_model() -> nn.Module:
    """Return a small Llama that splits up to 16 ways on each axis; grouped heads, tied head."""
    return sharpened(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=16, num_heads=32,
            num_kv_heads=16, tie_embeddings=True,
        )
    )  # fmt: skip


def sharpened(config: LlamaConfig) -> nn.Module:
    """Return a Llama with larger weights: the usual ones leave attention nearly uniform."""
    model = Llama(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    return model


def default_batch(step: int, *, vocab_size: int = 64, rows: int = 16, length: int = 16) -> Batch:
    """Return random tokens with ragged labels: some rows and columns have no valid one at all."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.25] = -100
    labels[: rows // 4] = -100
    labels[rows // 4 : rows // 2, length // 2 :] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def wide_batch(step: int) -> Batch:
    """Return as many rows as 16 data-parallel ranks with two micro-batches need."""
    return default_batch(step, rows=32)


def make_optimizer(model: nn.Module, step: int) -> torch.optim.Optimizer:
    """Return unclipped SGD for the first steps, and AdamW (after clipping) for the last."""
    if step < SGD_STEPS:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / 10, eps=ADAM_EPS)


def one_process(model: nn.Module, batches: Sequence[Batch]) -> list[Step]:
    """Train the plain model in plain PyTorch, whole batches at once, dropout switched off."""
    dropout.switch(model, on=False)
    steps = []
    for number, batch in enumerate(batches):
        labels = batch["labels"]
        inputs = {name: entry for name, entry in batch.items() if name != "labels"}
        with model_precision(next(model.parameters()).dtype):
            loss = token_loss_sum(model(**inputs), labels) / max(int((labels != -100).sum()), 1)
            loss.backward()
        named = list(model.named_parameters(remove_duplicate=False))
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        optimizer = make_optimizer(model, number)
        own = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(own)
        if number >= SGD_STEPS:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        steps.append(Step(loss.detach(), norm, gradients, weights))
    return steps


def chain_length(model: nn.Module, batch: Batch) -> int:
    """Return how many additions stand, at most, between the inputs and any number compared.

    Each weight matrix adds its two sizes (the sums of forward and of backward), attention and the
    loss add the tokens of the batch.
    """
    matrices = sum(sum(p.shape) for p in model.parameters() if p.ndim > 1)
    return matrices + 2 * batch["input_ids"].numel()


def as_saved(steps: list[Step]) -> list[dict[str, Any]]:
    """Return plain containers, which ``torch.load(weights_only=True)`` reads."""
    return [
        {"loss": s.loss, "norm": s.norm, "gradients": s.gradients, "weights": s.weights}
        for s in steps
    ]

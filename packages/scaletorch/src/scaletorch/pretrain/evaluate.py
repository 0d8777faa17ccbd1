"""A trained model's loss on text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..dist.errors import InvalidArgumentError
from .data import IGNORED_LABEL, Corpus, load_corpus
from .saved import Trained

ROWS = 16  # sequences at a time


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model makes of a text.

    Attributes:
        loss: Mean over the tokens, in nats.
        tokens: How many were predicted.
        step: Steps that the model was trained for.
        seen: Whether it is the text that the model was trained on.
    """

    loss: float
    tokens: int
    step: int
    seen: bool

    def __str__(self) -> str:
        text = (
            "the text that it was trained on" if self.seen else "other text than it was trained on"
        )
        return (
            f"loss {self.loss:.4f} nats per token, perplexity {math.exp(min(self.loss, 700)):.2f}, "
            f"after step {self.step}: {self.tokens:,} tokens of {text}"
        )


@torch.no_grad()
def evaluate(trained: Trained, data: Iterable[Path] = (), *, sequences: int = 64) -> Evaluation:
    """Return the loss over sequences that are spread evenly over a text.

    Args:
        trained: The model.
        data: As for training.
        sequences: How many, each as long as in training; fewer where the text is shorter.

    Raises:
        InvalidArgumentError: Less than one sequence.
    """
    if sequences < 1:
        raise InvalidArgumentError(f"sequences must be at least 1, got {sequences}")
    corpus = load_corpus(data, trained.tokenizer, seq_len=trained.seq_len)
    total, count = 0.0, 0
    for begins in _begins(corpus, trained.seq_len, sequences).split(ROWS):
        positions = begins[:, None] + torch.arange(trained.seq_len + 1)
        window = corpus.tokens[positions].long()
        labels = window[:, 1:].masked_fill(corpus.starts[positions[:, 1:]], IGNORED_LABEL)
        logits = trained.model(window[:, :-1])
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        total, count = total + loss.item(), count + int((labels != IGNORED_LABEL).sum())
    mean = total / count if count else math.nan
    return Evaluation(mean, count, trained.step, corpus.digest == trained.data)


def _begins(corpus: Corpus, seq_len: int, sequences: int) -> torch.Tensor:
    """Return where the sequences begin, [n], none of them over another."""
    room = len(corpus.tokens) - seq_len
    sequences = min(sequences, max(room // seq_len, 1))
    return torch.linspace(0, room - 1, sequences, dtype=torch.float64).long()

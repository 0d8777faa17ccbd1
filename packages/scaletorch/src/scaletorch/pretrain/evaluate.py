"""A trained model's loss on text."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..compose import eval_step, parallelize
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import ProcessGroupManager, get_process_group_manager
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
    batches = [
        _batch(corpus, begins, trained.seq_len)
        for begins in _begins(corpus, trained.seq_len, sequences).split(ROWS)
    ]
    frozen = copy.deepcopy(trained.model).requires_grad_(False)  # which needs no gradients' memory
    manager = get_process_group_manager() or ProcessGroupManager()
    loss = eval_step(parallelize(frozen, manager), batches)
    tokens = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches)
    return Evaluation(loss.item(), tokens, trained.step, corpus.digest == trained.data)


def _batch(corpus: Corpus, begins: torch.Tensor, seq_len: int) -> dict[str, torch.Tensor]:
    """Return sequences [n, seq_len] that begin there, and what follows each of their tokens."""
    positions = begins[:, None] + torch.arange(seq_len + 1)
    window = corpus.tokens[positions].long()
    labels = window[:, 1:].masked_fill(corpus.starts[positions[:, 1:]], IGNORED_LABEL)
    return {"input_ids": window[:, :-1], "labels": labels}


def _begins(corpus: Corpus, seq_len: int, sequences: int) -> torch.Tensor:
    """Return where the sequences begin, [n], none of them over another."""
    room = len(corpus.tokens) - seq_len
    sequences = min(sequences, max(room // seq_len, 1))
    return torch.linspace(0, room - 1, sequences, dtype=torch.float64).long()

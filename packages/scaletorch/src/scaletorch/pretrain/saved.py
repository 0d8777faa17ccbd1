"""A trained model from a run's folder, in this process; text that it draws, its loss on text."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import CheckpointError, DamagedCheckpointError, load
from ..checkpoint.format.folders import candidates
from ..checkpoint.format.values import decode
from ..checkpoint.loading import read_document
from ..compose import eval_step, parallelize
from ..dist.errors import InvalidArgumentError
from ..models import Llama, LlamaConfig
from ..parallel.pg_manager import ProcessGroupManager, get_process_group_manager
from .config import plain_model, read_sizes
from .data import IGNORED_LABEL, Corpus, byte_tokens, load_corpus, read_tokenizer, vocabulary_size


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model and its text.

    Attributes:
        model: On the CPU, in the dtype of its weights.
        step: Steps it was trained for.
        seq_len: Tokens in a sequence of its training.
        data: Digest of the text that it was trained on.
        tokenizer: The file of its tokens; None if these are bytes.
    """

    model: Llama
    step: int
    seq_len: int
    data: str
    tokenizer: Path | None

    def encode(self, text: str) -> Tensor:
        """Return a text's tokens, [L] int64."""
        if self.tokenizer is None:
            return byte_tokens(text.encode()).long() if text else torch.empty(0, dtype=torch.int64)
        return torch.tensor(read_tokenizer(self.tokenizer).encode(text).ids, dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens, [L]."""
        if self.tokenizer is None:
            return bytes(tokens.tolist()).decode(errors="replace")
        return str(read_tokenizer(self.tokenizer).decode(tokens.tolist()))


def load_trained(folder: Path, tokenizer: Path | None = None) -> Trained:
    """Load the newest good checkpoint of a run, of whatever layout.

    Args:
        folder: A run's `out`, its checkpoints, or one of these.
        tokenizer: In place of the file that the run was given.

    Raises:
        InvalidArgumentError: There is none, or the tokenizer is another.
        CheckpointError: It is damaged or of another program, or the folder holds other files.
    """
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    damage: list[str] = []
    for path in candidates(root.absolute()):
        try:
            return _load(path, tokenizer)
        except DamagedCheckpointError as error:
            damage.append(str(error))
    if damage:
        raise DamagedCheckpointError("\n".join(damage))
    raise InvalidArgumentError(f"{folder} has no checkpoint: train with --out and --save-every")


def _load(path: Path, tokenizer: Path | None) -> Trained:
    extra = decode(read_document(path)["extra"])
    try:
        settings = extra["settings"]
        sizes = read_sizes(extra["model"])
        file = tokenizer or (Path(extra["tokenizer"]) if extra["tokenizer"] else None)
        seq_len, data = int(settings["seq_len"]), str(settings["data"])
        dtype = torch.float64 if settings["dtype"] == "float64" else torch.float32
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} was not saved by this command, or by an earlier version of it: {error!r}"
        ) from error
    _check_tokenizer(file, sizes)
    model = plain_model(sizes).to(dtype)
    loaded = load(path, model)
    if loaded is None:
        raise InvalidArgumentError(f"{path} is no checkpoint")
    return Trained(model.eval(), loaded.step, seq_len, data, file)


def _check_tokenizer(file: Path | None, sizes: LlamaConfig) -> None:
    size = vocabulary_size(file)
    if size != sizes.vocab_size:
        raise InvalidArgumentError(
            f"the tokenizer {file} has {size} tokens, and the model {sizes.vocab_size}"
        )


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
        corpus.window(begins[:, None], trained.seq_len)
        for begins in _begins(corpus, trained.seq_len, sequences).split(ROWS)
    ]
    frozen = copy.deepcopy(trained.model).requires_grad_(False)  # which needs no gradients' memory
    manager = get_process_group_manager() or ProcessGroupManager()
    loss = eval_step(parallelize(frozen, manager), batches)
    tokens = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches)
    return Evaluation(loss.item(), tokens, trained.step, corpus.digest == trained.data)


def _begins(corpus: Corpus, seq_len: int, sequences: int) -> torch.Tensor:
    """Return where the sequences begin, [n], none of them over another."""
    room = len(corpus.tokens) - seq_len
    sequences = min(sequences, max(room // seq_len, 1))
    return torch.linspace(0, room - 1, sequences, dtype=torch.float64).long()

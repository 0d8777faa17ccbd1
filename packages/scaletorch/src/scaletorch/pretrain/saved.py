"""A trained model out of a run's folder, whole and in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import CheckpointError, DamagedCheckpointError, load
from ..checkpoint.format.folders import candidates
from ..checkpoint.format.values import decode
from ..checkpoint.loading import read_document
from ..dist.errors import InvalidArgumentError
from ..models import Llama, LlamaConfig
from .data import byte_tokens, read_tokenizer, vocabulary_size
from .sizes import plain_model, read_sizes


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

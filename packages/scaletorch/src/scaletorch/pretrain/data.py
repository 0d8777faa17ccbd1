"""Text as one stream of tokens, and deterministic global batches from it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dist import all_gather_object
from ..dist.errors import InvalidArgumentError, MismatchError, StateError
from ..parallel.pg_manager import IGNORED

TEXT_SUFFIXES = {".c", ".h", ".json", ".jsonl", ".md", ".py", ".rst", ".toml", ".txt", ".yaml"}
Encoder = Callable[[bytes], Tensor]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents joined into one stream."""

    tokens: Tensor  # token ids, [T] uint8 or int32
    starts: Tensor  # [T] bool, True at the first token of each document
    vocab_size: int  # highest possible token id plus one
    digest: str  # hash of the text, the same on all machines with the same text

    def global_batch(
        self, step: int, *, batch_size: int, seq_len: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the global batch of `step`, the same on every rank and for every layout.

        `input_ids` and `labels` are [batch_size, seq_len]. Labels are aligned with inputs, and -100
        if the next token begins another document.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        offsets = torch.randint(len(self.tokens) - seq_len, (batch_size, 1), generator=generator)
        positions = offsets + torch.arange(seq_len + 1)
        window = self.tokens[positions].long()
        labels = window[:, 1:].masked_fill(self.starts[positions[:, 1:]], IGNORED)
        return {"input_ids": window[:, :-1], "labels": labels}


def load_corpus(data: Iterable[Path], tokenizer: Path | None, *, seq_len: int) -> Corpus:
    """Read documents from files and folders, by default the Python standard library's sources."""
    encode, vocab_size = (byte_tokens, 256) if tokenizer is None else tokenizer_encoder(tokenizer)
    texts = [path.read_bytes() for path in list(text_files(data)) or standard_library()]
    documents = [encode(text) for text in texts if text]
    lengths = torch.tensor([0, *map(len, documents)])
    total = int(lengths.sum())
    if total <= seq_len:
        raise InvalidArgumentError(
            f"{len(texts)} files hold {total} tokens; a sequence of {seq_len} needs one more than "
            "its length: add data or shorten seq_len"
        )
    starts = torch.zeros(total + 1, dtype=torch.bool)
    starts[lengths.cumsum(0)] = True
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    return Corpus(torch.cat(documents), starts[:-1], vocab_size, digest)


def check_paths(data: Iterable[Path], tokenizer: Path | None) -> None:
    """Refuse paths that do not exist and a tokenizer that cannot be read."""
    for _ in text_files(data):
        pass
    if tokenizer is not None:
        read_tokenizer(tokenizer)


def text_files(data: Iterable[Path]) -> Iterator[Path]:
    """Yield the named files and the text files below named folders, in a fixed order."""
    for path in map(Path, data):
        if path.is_file():
            yield path
        elif path.is_dir():
            below = (p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
            yield from sorted(below)
        else:
            raise InvalidArgumentError(f"data path {path} is neither a file nor a folder")


def standard_library() -> Iterator[Path]:
    """Yield the source files of the running Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            yield path


def byte_tokens(text: bytes) -> Tensor:
    """Return the bytes of a non-empty text as its tokens."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_tokenizer(path: Path) -> Any:
    """Return the `Tokenizer` of a `tokenizers` file."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise StateError(
            "--tokenizer needs the tokenizers library: pip install 'scaletorch[tokenizer]'"
        ) from error
    if not path.is_file():
        raise InvalidArgumentError(f"tokenizer {path} is not a file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InvalidArgumentError(
            f"tokenizer {path} cannot be read as a tokenizer.json: {error}"
        ) from error


def tokenizer_encoder(path: Path) -> tuple[Encoder, int]:
    """Return an encoder and the vocabulary size of a `tokenizers` file."""
    tokenizer = read_tokenizer(path)

    def encode(text: bytes) -> Tensor:
        return torch.tensor(tokenizer.encode(text.decode(errors="replace")).ids, dtype=torch.int32)

    return encode, tokenizer.get_vocab_size()


def check_same_data(corpus: Corpus) -> None:
    """Raise MismatchError on every rank if ranks read different text."""
    digests = all_gather_object(corpus.digest)
    if len(set(digests)) > 1:
        shown = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        raise MismatchError(f"ranks read different text ({shown}); give all the same files")

"""The transformers of the data-parallel benchmark, and their batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_DIM = 64
Batch = tuple[Tensor, Tensor]  # tokens and labels, [batch, length] both


@dataclass(frozen=True)
class Size:
    """A model, and its batch for a step on every rank.

    Attributes:
        dim: Hidden size.
        layers: Number of blocks.
        length: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        micro_batches: Micro-batches of a step.
        dtype: Dtype of the parameters.
        vocab: Vocabulary size.
    """

    dim: int
    layers: int
    length: int
    batch: int = 1
    micro_batches: int = 1
    dtype: str = "float32"
    vocab: int = 2048

    def __str__(self) -> str:
        batches = "" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches of "
        tokens = f"{batches}{self.batch} x {self.length} tokens a rank"
        return f"{self.parameters / 1e6:.1f} M {self.dtype}, {tokens}"

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        with torch.device("meta"):
            return sum(each.numel() for each in Transformer(self).parameters())


class Block(nn.Module):
    """Pre-norm causal self-attention and feed-forward network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, D] to the same shape."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, HEAD_DIM))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A plain language model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of [B, L] tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def make_model(size: Size) -> Transformer:
    """Return the same model on every rank."""
    torch.manual_seed(1)
    return Transformer(size).to(DTYPES[size.dtype])


def make_batches(size: Size, rank: int) -> list[Batch]:
    """Return a rank's own micro-batches."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = size.micro_batches, 2, size.batch, size.length
    tokens = torch.randint(size.vocab, shape, generator=generator)
    return [(batch[0], batch[1]) for batch in tokens]


def shared_copy(model: Transformer) -> Transformer:
    """Return a copy whose parameters share memory with the model's, with separate gradients."""
    parameters = {id(each): nn.Parameter(each.detach()) for each in model.parameters()}
    return copy.deepcopy(model, parameters)

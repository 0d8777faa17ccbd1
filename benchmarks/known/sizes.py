"""A transformer's sizes, and how a program runs it, as far as memory and time depend on that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaletorch.dist.errors import InvalidArgumentError

HALF, SINGLE = 2, 4  # bytes of an element in computation, and in sums


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder-only transformer.

    Attributes:
        name: Name of the model.
        hidden: Hidden size.
        layers: Number of layers.
        heads: Number of query heads.
        vocab: Rows of the embedding, with padding.
        length: Tokens of a sequence.
        kv_heads: Number of key/value heads; 0 for as many as `heads`.
        ffn: Inner size of the MLP; 0 for four times `hidden`.
        gated: Whether the MLP is gated, as Llama's, or has plain GELU, as GPT's.
        plain: Whether it has no biases, learned positions and layer norms, as Llama.
        tied: Whether the head is tied to the embedding.

    Raises:
        InvalidArgumentError: A size is below 1, or heads do not divide what they share.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    vocab: int
    length: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    plain: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "vocab", "length"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise InvalidArgumentError(
                f"hidden {self.hidden} is not a multiple of {self.heads} heads"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise InvalidArgumentError(
                f"{self.heads} heads cannot share {self.kv_heads} of keys and values"
            )

    @property
    def keys(self) -> int:
        """Size of a token's keys in all heads."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def inner(self) -> int:
        """Inner size of the MLP."""
        return self.ffn or 4 * self.hidden


@dataclass(frozen=True, slots=True)
class Program:
    """The way a program runs a transformer, and the terms that a paper counts.

    Attributes:
        attention: "core" keeps scores and probabilities, "selective" recomputes them in backward
            (Korthikanti et al. 2022), "fused" never writes them (Dao et al. 2022).
        dropout: Whether it drops attention probabilities and the layers' residual additions.
        ends: Whether embeddings, the last norm, the head and the loss are counted.
        small: Whether biases, norms and positions are counted.
        summing: Bytes moved for each parameter to accumulate a micro-batch's gradient.
        scattered: Whether tp ranks send only their shards to the next stage, which gathers them
            (Narayanan et al. 2021, section 4.1), or each the full output.
        placed: Whether the embedding counts as a layer when layers are distributed.
        messages: Whether messages between stages are counted.
    """

    attention: Literal["core", "selective", "fused"] = "core"
    dropout: bool = True
    ends: bool = True
    small: bool = True
    summing: int = 2 * SINGLE
    scattered: bool = False
    placed: bool = False
    messages: bool = True

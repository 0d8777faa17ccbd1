"""A transformer's sizes, and how a program runs it, as far as bytes and seconds depend on that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaletorch.dist.errors import InvalidArgumentError

HALF, SINGLE = 2, 4  # bytes of what is computed with, and of sums


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder-only transformer.

    Attributes:
        name: Of the model.
        hidden: Size between layers.
        layers: How many.
        heads: Of queries; `hidden` is shared out over them.
        vocab: Rows of the embedding, as padded.
        length: Tokens of a sequence.
        kv_heads: Of keys and values; 0 for as many as `heads`.
        ffn: Size inside the MLP; 0 for four times `hidden`.
        gated: Whether the MLP has a gate, as Llama's, or GELU alone, as GPT's.
        plain: Whether biases, learned positions and layer norms are left out, as in Llama.
        tied: Whether the head is the embedding.

    Raises:
        InvalidArgumentError: A size below 1, or heads that do not divide what they share out.
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
        """Size of the keys of a token in all heads."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def inner(self) -> int:
        """Size inside the MLP."""
        return self.ffn or 4 * self.hidden


@dataclass(frozen=True, slots=True)
class Program:
    """How a program runs a transformer, and what of it a paper counts.

    Attributes:
        attention: "core" keeps scores and probabilities, "selective" computes them again in
            backward (Korthikanti et al. 2022), "fused" never writes them (Dao et al. 2022).
        dropout: Whether it drops attention's probabilities and what layers add.
        ends: Whether embeddings, the last norm, the head and the loss are counted.
        small: Whether biases, norms and positions are counted.
        summing: Bytes moved for each parameter to add a micro-batch's gradient to the sum.
        scattered: Whether tp ranks hand their shares to the next stage, which gathers them
            (Narayanan et al. 2021, section 4.1), or each the whole.
        placed: Whether the embedding takes the place of a layer where these are distributed.
        messages: Whether what stages hand one another is counted.
    """

    attention: Literal["core", "selective", "fused"] = "core"
    dropout: bool = True
    ends: bool = True
    small: bool = True
    summing: int = 2 * SINGLE
    scattered: bool = False
    placed: bool = False
    messages: bool = True

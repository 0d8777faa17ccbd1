"""Flops and memory traffic of a transformer for a micro-batch, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaletorch.plan.description import Affine, Cut, Work

from .sizes import HALF, SINGLE, Program, Sizes

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Terms:
    """Common terms of the closed forms of a cut.

    Attributes:
        sizes: Sizes of the model.
        program: How it is run.
        cut: How layers are sharded.
    """

    sizes: Sizes
    program: Program
    cut: Cut

    @property
    def tokens(self) -> float:
        """Tokens of a row on each cp rank."""
        return self.sizes.length / self.cut.cp

    @property
    def shared(self) -> float:
        """Tokens of a row divided over tp."""
        return self.tokens / self.cut.tp

    @property
    def whole(self) -> float:
        """Tokens of a row between sharded layers."""
        return self.shared if self.cut.sequence_parallel else self.tokens

    @property
    def scores(self) -> float:
        """Attention scores of a row on each rank."""
        return self.sizes.heads * self.shared * self.sizes.length


def work_of_layer(terms: Terms) -> tuple[Work, ...]:
    """Return the operations of a layer."""
    of, tp = terms.sizes, terms.cut.tp
    ups = 2 if of.gated else 1
    products = (
        (of.hidden, (of.hidden + 2 * of.keys) / tp),
        (of.hidden / tp, of.hidden),
        (of.hidden, ups * of.inner / tp),
        (of.inner / tp, of.hidden),
    )
    work = [each for pair in products for each in _product(terms, *pair)]
    weights = sum(rows * columns for rows, columns in products)
    return (*work, *_core(terms), *_between(terms), _summing(terms, weights))


def _product(terms: Terms, rows: float, columns: float) -> tuple[Work, Work]:
    """Return a matmul with a weight in forward, and the two of its gradients."""
    flops = 2 * terms.tokens * rows * columns
    moved = Affine(HALF * rows * columns, HALF * terms.tokens * (rows + columns))
    twice = Affine(2 * moved.fixed, 2 * moved.per_row)
    return (
        Work("matmul", 1, Affine(0, flops), moved),
        Work("matmul", 2, Affine(0, 2 * flops), twice, "backward"),
    )


def _core(terms: Terms) -> list[Work]:
    """Return attention's core; a causal one is computed in full unless it is fused."""
    of, program, scores = terms.sizes, terms.program, terms.scores
    flops = 2 * scores * of.hidden / of.heads  # one product
    sides = HALF * (2 * of.hidden + 2 * of.keys) * terms.shared
    if program.attention == "fused":
        return [
            Work("attention", 1, Affine(0, flops), Affine(0, sides)),
            Work("attention", 1, Affine(0, 2.5 * flops), Affine(0, 2 * sides), "backward"),
        ]
    # Softmax reads and writes scores; dropout reads, writes and adds a mask.
    forward, backward = 2 * HALF, 3 * HALF
    if program.dropout:
        forward, backward = forward + 2 * HALF + 1, backward + 2 * HALF + 1
    passes = 2 if program.dropout else 1

    def once(phase: Phase) -> list[Work]:
        return [
            Work("matmul", 2, Affine(0, 2 * flops), Affine(0, 2 * HALF * scores + sides), phase),
            Work("other", passes, Affine(), Affine(0, forward * scores), phase),
        ]

    again = once("backward") if program.attention == "selective" else []
    moved = Affine(0, 4 * HALF * scores + 2 * sides)
    return [
        *once("forward"), *again,
        Work("matmul", 4, Affine(0, 4 * flops), moved, "backward"),
        Work("other", passes, Affine(), Affine(0, backward * scores), "backward"),
    ]  # fmt: skip


def _between(terms: Terms) -> list[Work]:
    """Return the operations between matmuls: norms, residuals with dropout, rotary, activations."""
    of, dropout = terms.sizes, terms.program.dropout
    hidden, inner = HALF * of.hidden * terms.whole, HALF * of.inner * terms.shared
    heads = HALF * (of.hidden + 2 * of.keys) * terms.shared
    mask = of.hidden * terms.whole if dropout else 0

    def other(count: int, moved: float, phase: Phase = "forward") -> Work:
        return Work("other", count, Affine(), Affine(0, moved), phase)

    return [
        other(2, 2 * 2 * hidden), other(2, 2 * (3 * hidden + mask)),
        other(3, 2 * heads), other(1, (3 if of.gated else 2) * inner),
        other(2, 2 * 4 * hidden, "backward"),  # a norm, and the residual sum
        other(2, 2 * (2 * hidden + mask) if dropout else 0, "backward"),
        other(3, 2 * heads, "backward"), other(1, (5 if of.gated else 3) * inner, "backward"),
    ]  # fmt: skip


def _summing(terms: Terms, weights: float) -> Work:
    return Work("other", 4, Affine(), Affine(terms.program.summing * weights), "backward")


def work_of_ends(terms: Terms) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Return the operations of the embedding, and of the last norm, head and loss."""
    of = terms.sizes
    hidden, logits = HALF * of.hidden * terms.whole, of.vocab * terms.shared
    weights = of.vocab * of.hidden / terms.cut.tp
    # Cast to float32; maximum, difference, exponentials, sum; target; gradient and cast back.
    loss, gradient = (HALF + SINGLE) + 5 * SINGLE, 2 * SINGLE + HALF
    first = (
        Work("other", 2, Affine(), Affine(0, 4 * hidden)),
        Work("other", 2, Affine(), Affine(0, 4 * hidden), "backward"),
        _summing(terms, weights),
    )
    last = (
        *_product(terms, of.hidden, of.vocab / terms.cut.tp),
        Work("other", 5, Affine(), Affine(0, 2 * hidden + loss * logits)),
        Work("other", 3, Affine(), Affine(0, 3 * hidden + gradient * logits), "backward"),
        _summing(terms, weights),
    )
    return first, last

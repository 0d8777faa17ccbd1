"""Messages of a transformer's tp and cp ranks for a micro-batch, in closed form."""

from __future__ import annotations

from scaletorch.plan.description import Affine, Sent

from .operations import Phase, Terms
from .sizes import HALF, SINGLE


def sent_by_layer(terms: Terms) -> tuple[Sent, ...]:
    """Return the collectives of a layer."""
    return (*_tensor(terms), *_context(terms))


def _tensor(terms: Terms) -> list[Sent]:
    """Return two all-reduces each way, or all-gathers and reduce-scatters of sequence shards."""
    if terms.cut.tp == 1:
        return []
    one = _ring(terms, HALF * terms.sizes.hidden)
    if not terms.cut.sequence_parallel:
        return [_sent("all_reduce", phase, 2, 2 * one) for phase in ("forward", "backward")]
    return [
        _sent("all_gather", "forward", 2, one),
        _sent("reduce_scatter", "forward", 2, one),
        _sent("all_gather", "backward", 2, one),
        _sent("reduce_scatter", "backward", 2, one),
        # The input is gathered again for the weights' gradients, while others are computed.
        _sent("all_gather", "backward", 2, one, awaited=False),
    ]


def _context(terms: Terms) -> list[Sent]:
    """Return all-gathers of keys and values, and reduce-scatters of gradients (Llama 3, 3.3.2)."""
    cp = terms.cut.cp
    if cp == 1:
        return []
    size = Affine(0, (cp - 1) * HALF * 2 * terms.sizes.keys * terms.shared)
    return [
        Sent("cp", "all_gather", "forward", 1, size),
        Sent("cp", "all_gather", "backward", 1, size),
        Sent("cp", "reduce_scatter", "backward", 1, size),
    ]


def sent_by_ends(terms: Terms) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Return the collectives of the embedding, and of the last norm, head and loss."""
    if terms.cut.tp == 1:
        return (), ()
    hidden, loss = _ring(terms, HALF * terms.sizes.hidden), _ring(terms, SINGLE)
    sums = _sent("all_reduce", "forward", 3, 2 * loss)  # maximum, sum of exponentials, target logit
    if not terms.cut.sequence_parallel:
        first = (_sent("all_reduce", "forward", 1, 2 * hidden),)
        return first, (sums, _sent("all_reduce", "backward", 1, 2 * hidden))
    return (
        (
            _sent("reduce_scatter", "forward", 1, hidden),
            _sent("all_gather", "backward", 1, hidden),
        ),
        (
            _sent("all_gather", "forward", 1, hidden),
            sums,
            _sent("reduce_scatter", "backward", 1, hidden),
        ),
    )


def _ring(terms: Terms, token: float) -> float:
    """Return the bytes that a rank sends in one round of a ring over a row's tokens."""
    return (terms.cut.tp - 1) * token * terms.shared


def _sent(operation: str, phase: Phase, count: int, each: float, *, awaited: bool = True) -> Sent:
    return Sent("tp", operation, phase, count, Affine(0, count * each), awaited)

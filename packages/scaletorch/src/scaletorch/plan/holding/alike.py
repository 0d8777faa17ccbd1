"""Parameters of a rank, by runs of equal blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..description import Behaviour, Description, Parameter
from .buckets import Backward, Bucket, Held, bucket_of

Alike = tuple[tuple[tuple[Held, ...], int, bool], ...]
"""Parameters of a block, how many blocks with such follow one another, whether they are layers."""


def of(
    parameter: Parameter, at: int, others: int, apart: bool, made: Sequence[Backward], name: str
) -> Held:
    """Return a parameter on a tp or ep rank.

    `apart` is whether edp is not cp x dp; `made` which backwards make its gradient, in the order of
    their chunks.
    """
    local = parameter.local[min(at, len(parameter.local) - 1)]
    *also, (chunk, late) = made
    expert = parameter.expert and apart
    return Held(local, parameter.item, others, expert, chunk, late, name, tuple(also))


def chosen(alike: Alike, expert: bool) -> Alike:
    """Return those parameters that are of experts, or the others."""
    own = (
        (tuple(p for p in held if p.expert is expert), times, layer) for held, times, layer in alike
    )
    return tuple(each for each in own if each[0])


def all_of(alike: Alike) -> list[Held]:
    """Return all of them, in the order of the model."""
    return [p for held, times, _ in alike for _ in range(times) for p in held]


def by_block(alike: Alike) -> Iterator[Bucket]:
    """Yield what `fully_shard` gathers together: each layer, and all the rest."""
    if rest := all_of(tuple(each for each in alike if not each[2])):
        yield bucket_of(rest, sharded=True, gathered="rest")
    for held, times, layer in alike:
        if layer and held:
            yield from [bucket_of(held, sharded=True, gathered="layer")] * times


def ties_made(
    description: Description,
    chunks: Sequence[Sequence[int]],
    behaviours: Sequence[Behaviour],
) -> dict[str, list[Backward]]:
    """Return for tied parameters of a rank the backwards that make their gradients, by chunks.

    Args:
        description: The model.
        chunks: Kinds of the blocks of the rank's chunks.
        behaviours: Of the kinds.
    """
    found: dict[str, list[Backward]] = {}
    if description.tied:
        for chunk, kind in ((at, kind) for at, own in enumerate(chunks) for kind in own):
            names = {f"{kind}.{each.name}": each.late for each in behaviours[kind].parameters}
            for tied in description.tied:
                for name in names.keys() & {*tied}:
                    for each in tied:
                        found.setdefault(each, []).append((chunk, names[name]))
    return found

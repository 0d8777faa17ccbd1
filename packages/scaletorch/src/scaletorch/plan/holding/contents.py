"""What the ranks of a pipeline have: kinds of blocks, of what comes and goes, and what is tied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..description import Description
from .stages import Places, holders_of


@dataclass(frozen=True, slots=True)
class Content:
    """What a rank of the pipeline has.

    Attributes:
        chunks: Kinds of the blocks of each chunk.
        entered: For each chunk the kind of the block whose output it receives; -1 is none.
        left: For each chunk the kind of the block whose output it sends on; -1 is none.
        ties: Names of tied parameters, and how many other ranks have them.
    """

    chunks: tuple[tuple[int, ...], ...]
    entered: tuple[int, ...]
    left: tuple[int, ...]
    ties: tuple[tuple[str, int], ...]

    @property
    def sent(self) -> list[int]:
        """Kinds of the blocks whose outputs it sends, once for each chunk that does."""
        return [kind for kind in self.left if kind >= 0]

    @property
    def returned(self) -> list[int]:
        """Kinds of the blocks whose outputs' gradients it sends back."""
        return [kind for kind in self.entered if kind >= 0]

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return sum(map(len, self.chunks))


def contents(
    description: Description, where: Places, stages: tuple[tuple[int, ...], ...]
) -> Iterator[Content]:
    """Yield what each rank of a pipeline has.

    Args:
        description: The model.
        where: Of `places`.
        stages: Of each rank, chunk by chunk.
    """
    kinds = [block.kind for block in description.blocks]
    owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
    blocks = {
        stage: chunk
        for own, chunks in zip(stages, where, strict=True)
        for stage, chunk in zip(own, chunks, strict=True)
    }
    holders = holders_of(description, where)
    for rank, (own, chunks) in enumerate(zip(stages, where, strict=True)):
        yield Content(
            chunks=tuple(tuple(kinds[at] for at in chunks[chunk]) for chunk in range(len(own))),
            entered=tuple(
                kinds[blocks[s - 1][-1]] if owner.get(s - 1, rank) != rank else -1 for s in own
            ),
            left=tuple(kinds[blocks[s][-1]] if owner.get(s + 1, rank) != rank else -1 for s in own),
            ties=tuple((name, len(ranks - {rank})) for name, ranks in holders.items()),
        )

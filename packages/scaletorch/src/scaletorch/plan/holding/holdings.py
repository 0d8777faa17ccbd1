"""Which blocks and parameters the ranks of a pipeline have, worked out once for equal ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from ..description import Behaviour, Description, Parameter
from ..layout import Layout
from .buckets import Bucket, Held, Optimizer, fill
from .stages import Places, places, stages_of


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

    @property
    def kinds(self) -> Iterator[int]:
        """Kinds of all its blocks."""
        return (kind for chunk in self.chunks for kind in chunk)


class Listed(NamedTuple):
    """A parameter of a rank.

    Attributes:
        parameter: What is known of it.
        others: How many other ranks of the pipeline have it.
        chunk: Of the rank, the first that has it.
        block: Of the rank, its number.
        kind: Of the block.
    """

    parameter: Parameter
    others: int
    chunk: int
    block: int
    kind: int


class Holdings:
    """What the ranks of a description hold.

    Args:
        description: The model.
        optimizer: What it keeps; by default AdamW.
    """

    def __init__(self, description: Description, optimizer: Optimizer | None = None) -> None:
        self.description = description
        self.optimizer = optimizer or Optimizer()
        self.layers = {b.kind for b in description.blocks if b.place == "layer"}
        self._names: dict[int, str] = {}
        for block in description.blocks:
            self._names.setdefault(block.kind, block.name)
        self.states: dict[Any, Any] = {}  # of memory.py
        self.activations: dict[Any, int] = {}
        self.workings: dict[Any, int] = {}
        self.sends: dict[Any, Any] = {}  # of traffic.py
        self.sums: dict[Any, Any] = {}
        self._contents: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self._numbers: dict[Content, int] = {}
        self._all: list[Content] = []
        self._runs: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = {}
        self._held: dict[object, tuple[Held, ...]] = {}
        self._buckets: dict[object, dict[str, tuple[tuple[Bucket, int], ...]]] = {}
        self._places: dict[object, int] = {}
        self._latest: dict[object, list[int]] = {}
        self._sums: dict[tuple[int, int, int], list[int]] = {}

    def numbers(self, layout: Layout) -> tuple[int, ...]:
        """Return for each rank of the pipeline a number, the same for ranks with the same content.

        Raises:
            InvalidArgumentError: Fewer layers than stages, or a schedule that is not to be had.
        """
        key = layout.schedule, layout.grid.pp, layout.chunks
        if key not in self._contents:
            found = []
            for each in self._read(places(self.description, layout), stages_of(*key)):
                if each not in self._numbers:
                    self._numbers[each] = len(self._all)
                    self._all.append(each)
                found.append(self._numbers[each])
            self._contents[key] = tuple(found)
        return self._contents[key]

    def content(self, number: int) -> Content:
        """Return what ranks of this number have."""
        return self._all[number]

    def name(self, kind: int) -> str:
        """Return the name of the first block of a kind."""
        return self._names[kind]

    def runs(self, number: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for each chunk the kinds of its blocks, and how many follow one another."""
        if number not in self._runs:
            chunks = self._all[number].chunks
            self._runs[number] = tuple(
                tuple((kind, sum(1 for _ in own)) for kind, own in groupby(chunk))
                for chunk in chunks
            )
        return self._runs[number]

    def parameters(self, layout: Layout, number: int, tp: int | None = None) -> tuple[Held, ...]:
        """Return the parameters of a rank of this number in the order of the model, tied ones once.

        Args:
            layout: The layout.
            number: Of `numbers`.
            tp: The tp rank, and the ep rank of experts; None is the one that has the most.
        """
        at = self._fullest(layout, number) if tp is None else tp
        key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number, at
        if key not in self._held:
            apart = layout.grid.ep * layout.grid.etp != layout.grid.tp  # else edp is cp x dp
            self._held[key] = tuple(
                _of(p, at, others, apart, chunk)
                for p, others, chunk, _, _ in self._listed(layout, number)
            )
        return self._held[key]

    def latest(self, layout: Layout, number: int) -> list[int]:
        """Return by chunk the bytes of the largest gradient that a backward makes in its end."""
        key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number
        if key not in self._latest:
            found = self._latest[key] = [0] * len(self._all[number].chunks)
            for each in self.parameters(layout, number):
                if each.late:
                    found[each.chunk] = max(found[each.chunk], each.elements * each.item)
        return self._latest[key]

    def buckets(
        self, layout: Layout, number: int, tp: int | None = None
    ) -> dict[str, tuple[tuple[Bucket, int], ...]]:
        """Return a rank's gradients as they travel, by axis: buckets, and how often each occurs."""
        zero = min(layout.zero, 1) if layout.zero < 3 else 3
        key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number, tp, zero
        if key not in self._buckets:
            if zero == 3:
                self._buckets[key] = self._by_block(layout, number, tp)
                return self._buckets[key]
            held = self.parameters(layout, number, tp)
            plain = [p for p in held if not p.expert]
            experts = [p for p in held if p.expert]
            found = {"cp_dp": self._filled(plain, zero > 0)}
            if experts:
                found["edp"] = self._filled(experts, zero > 0)
            self._buckets[key] = found
        return self._buckets[key]

    def _by_block(
        self, layout: Layout, number: int, tp: int | None
    ) -> dict[str, tuple[tuple[Bucket, int], ...]]:
        """Return what `fully_shard` gathers together: each layer, and all the rest."""
        groups: dict[tuple[bool, int], list[Held]] = {}
        listed = zip(self.parameters(layout, number, tp), self._listed(layout, number), strict=True)
        for held, (_, _, _, place, kind) in listed:
            at = place if kind in self.layers else -1
            groups.setdefault((held.expert, at), []).append(held)
        found: dict[str, Counter[Bucket]] = {"cp_dp": Counter()}
        for (expert, at), own in groups.items():
            sizes = tuple(p.elements for p in own)
            halves = tuple((p.chunk, p.late) for p in own)
            bucket = Bucket(sizes, own[0].item, True, halves, "rest" if at < 0 else "layer")
            found.setdefault("edp" if expert else "cp_dp", Counter())[bucket] += 1
        return {axis: tuple(own.items()) for axis, own in found.items()}

    def _filled(self, held: list[Held], zero: bool) -> tuple[tuple[Bucket, int], ...]:
        size = self.optimizer.bucket_size
        shared = [p for p in held[::-1] if zero and not p.others]
        rest = [p for p in held[::-1] if not zero or p.others]
        found = [*fill(shared, size, sharded=True), *fill(rest, size, sharded=False)]
        return tuple(Counter(found).items())

    def _fullest(self, layout: Layout, number: int) -> int:
        """Return the tp rank, and ep rank, that has the most bytes of parameters."""
        grid = layout.grid
        key = grid.tp, grid.ep, grid.etp, number
        if key not in self._places:
            behaviours = self.description.behaviours(layout.cut)
            ranks = max(grid.tp, grid.ep)
            total = [0] * ranks
            for kind, times in Counter(self._all[number].kinds).items():
                sums = self._sums_of((grid.tp, grid.ep, kind), behaviours[kind], ranks)
                total = [a + b * times for a, b in zip(total, sums, strict=True)]
            self._places[key] = total.index(max(total))
        return self._places[key]

    def _sums_of(self, key: tuple[int, int, int], block: Behaviour, ranks: int) -> list[int]:
        if key not in self._sums:
            self._sums[key] = [
                sum(p.local[min(at, len(p.local) - 1)] * p.item for p in block.parameters)
                for at in range(ranks)
            ]
        return self._sums[key]

    def _listed(self, layout: Layout, number: int) -> Iterator[Listed]:
        """Yield a rank's parameters."""
        behaviours: tuple[Behaviour, ...] = self.description.behaviours(layout.cut)
        content = self._all[number]
        others = dict(content.ties)
        latest = self._latest_ties(number, behaviours)
        seen: set[str] = set()
        blocks = ((at, kind) for at, own in enumerate(content.chunks) for kind in own)
        for place, (chunk, kind) in enumerate(blocks):
            for each in behaviours[kind].parameters:
                name = f"{kind}.{each.name}"
                if name in latest:  # backward comes to the last chunk first
                    chunk, each = latest[name][0], replace(each, late=latest[name][1])
                if name not in seen:
                    yield Listed(each, others.get(name, 0), chunk, place, kind)
                seen.update(next((names for names in self.description.tied if name in names), ()))

    def _latest_ties(
        self, number: int, behaviours: Sequence[Behaviour]
    ) -> dict[str, tuple[int, bool]]:
        """Return for tied parameters of a rank the last chunk, and whether they are late there."""
        found: dict[str, tuple[int, bool]] = {}
        if self.description.tied:
            chunks = self._all[number].chunks
            for chunk, kind in ((at, kind) for at, own in enumerate(chunks) for kind in own):
                names = {f"{kind}.{each.name}": each.late for each in behaviours[kind].parameters}
                for tied in self.description.tied:
                    for name in names.keys() & {*tied}:
                        found |= dict.fromkeys(tied, (chunk, names[name]))
        return found

    def _read(self, where: Places, stages: tuple[tuple[int, ...], ...]) -> Iterator[Content]:
        kinds = [block.kind for block in self.description.blocks]
        owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
        blocks = {
            stage: chunk
            for own, chunks in zip(stages, where, strict=True)
            for stage, chunk in zip(own, chunks, strict=True)
        }
        holders = holders_of(self.description, where)
        for rank, (own, chunks) in enumerate(zip(stages, where, strict=True)):
            yield Content(
                chunks=tuple(tuple(kinds[at] for at in chunks[chunk]) for chunk in range(len(own))),
                entered=tuple(
                    kinds[blocks[s - 1][-1]] if owner.get(s - 1, rank) != rank else -1 for s in own
                ),
                left=tuple(
                    kinds[blocks[s][-1]] if owner.get(s + 1, rank) != rank else -1 for s in own
                ),
                ties=tuple((name, len(ranks - {rank})) for name, ranks in holders.items()),
            )


def holders_of(description: Description, where: Places) -> dict[str, set[int]]:
    """Return the ranks of the pipeline that have a tied parameter, by each of its names."""
    on: dict[int, set[int]] = {}
    for rank, chunks in enumerate(where):
        for at in (at for chunk in chunks for at in chunk):
            on.setdefault(description.blocks[at].kind, set()).add(rank)
    return {
        name: {r for each in names for r in on.get(int(each.partition(".")[0]), ())}
        for names in description.tied
        for name in names
    }


def _of(parameter: Parameter, at: int, others: int, apart: bool, chunk: int) -> Held:
    local = parameter.local[min(at, len(parameter.local) - 1)]
    expert = parameter.expert and apart
    return Held(local, parameter.item, others, expert, chunk, parameter.late)

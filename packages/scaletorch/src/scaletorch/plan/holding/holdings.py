"""Which blocks and parameters the ranks of a pipeline have, worked out once for equal ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ..description import Behaviour, Cut, Description
from ..layout import Layout, cut_of
from .alike import Alike, all_of, by_block, chosen, of, ties_made
from .buckets import Bucket, Buckets, Held, Optimizer, bucket_of, fill
from .contents import Content, contents
from .stages import places, stages_of

Together = tuple[int, bool, bool, str]


def asked_together(layout: Layout) -> Together:
    """Return what cuts have in common that a search is likely to ask of: ranks, and options."""
    grid = layout.grid
    shares = layout.sequence_parallel or grid.tp == 1
    return grid.tp * grid.cp, layout.recompute == "selective", shares, layout.cp_method


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
        self.all_kinds = len(next(iter(description.cuts.values()), ()))
        self.kinds_of_chunks: list[frozenset[int]] = []
        self._names = {block.kind: block.name for block in reversed(description.blocks)}
        self.states: dict[Any, Any] = {}  # of memory/
        self.groups: dict[Any, Any] = {}
        self.running: dict[Any, Any] = {}
        self.sizes: dict[Any, Any] = {}
        self.busy: dict[Any, Any] = {}
        self.late: dict[Any, Any] = {}
        self.peaks: dict[Any, Any] = {}
        self.brought: dict[Any, Any] = {}
        self.filled: dict[Any, Any] = {}
        self.slots: dict[Any, Any] = {}
        self.made: dict[Any, Any] = {}
        self.most: dict[Any, Any] = {}
        self.sent: dict[Any, Any] = {}  # of traffic.py
        self.sends: dict[Any, Any] = {}
        self.ends: dict[Any, Any] = {}
        self.sums: dict[Any, Any] = {}
        self._contents: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self._numbers: dict[Content, int] = {}
        self._all: list[Content] = []
        self.owned: dict[Any, Any] = {}  # of timing/
        self._chunks: dict[int, list[Counter[int]]] = {}
        self._kinds: dict[int, Counter[int]] = {}
        self._runs: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = {}
        self._held: dict[object, tuple[Held, ...]] = {}
        self._alike: dict[object, Alike] = {}
        self._buckets: dict[object, dict[str, Buckets]] = {}
        self._filled: dict[tuple[Alike, int], Buckets] = {}
        self._members: dict[tuple[Alike, bool | None], Counter[tuple[Held, ...]]] = {}
        self._same: dict[Bucket, Bucket] = {}
        self._latest: dict[object, tuple[int, ...]] = {}
        self._places: dict[object, int] = {}
        self._replicas: dict[object, tuple[int, int]] = {}
        self._cuts: dict[Together, dict[Cut, int]] = {}
        self._sums: dict[tuple[int, int, int], list[int]] = {}

    def cuts(self, layout: Layout) -> dict[Cut, int]:
        """Return the places of cuts of `asked_together`, of which the layout's is one."""
        key = ranks, selective, shares, method = asked_together(layout)
        if key not in self._cuts:
            each = [
                cut_of(c.tp, c.cp, c.ep, c.sequence_parallel, c.cp_method, c.selective)
                for c in self.description.cuts
                if (c.tp * c.cp, c.selective) == (ranks, selective)
                and (c.tp == 1 or c.sequence_parallel is shares)
                and c.cp_method in ("", method)
            ]
            self._cuts[key] = {cut: at for at, cut in enumerate(each)}
        return self._cuts[key]

    def place_of_cut(self, layout: Layout) -> int:
        """Return the place of a layout's cut.

        Raises:
            InvalidArgumentError: The model cannot be cut so, or it was not described.
        """
        if (place := self.cuts(layout).get(layout.cut)) is None:
            raise self.description.missing(layout.cut)
        return place

    def numbers(self, layout: Layout) -> tuple[int, ...]:
        """Return for each rank of the pipeline a number, the same for ranks with the same content.

        Raises:
            InvalidArgumentError: Fewer layers than stages, or a schedule that is not to be had.
        """
        key = layout.schedule, layout.grid.pp, layout.chunks
        if key not in self._contents:
            found = []
            for each in contents(
                self.description, places(self.description, layout), stages_of(*key)
            ):
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

    def chunks(self, number: int) -> list[Counter[int]]:
        """Return how many blocks of each kind each chunk has."""
        if number not in self._chunks:
            self._chunks[number] = [Counter(chunk) for chunk in self._all[number].chunks]
        return self._chunks[number]

    def kinds(self, number: int) -> Counter[int]:
        """Return how many blocks of each kind ranks of this number have."""
        if number not in self._kinds:
            self._kinds[number] = sum(self.chunks(number), Counter[int]())
        return self._kinds[number]

    def runs(self, number: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for each chunk the kinds of its blocks, and how many follow one another."""
        if number not in self._runs:
            chunks = self._all[number].chunks
            self._runs[number] = tuple(
                tuple((kind, sum(1 for _ in own)) for kind, own in groupby(chunk))
                for chunk in chunks
            )
        return self._runs[number]

    def place_of_kinds(self, runs: tuple[tuple[int, int], ...]) -> int:
        """Return where the kinds of a chunk's blocks are in `kinds_of_chunks`."""
        kinds = frozenset(kind for kind, _ in runs)
        if kinds not in self.kinds_of_chunks:
            self.kinds_of_chunks.append(kinds)
        return self.kinds_of_chunks.index(kinds)

    def parameters(self, layout: Layout, number: int, tp: int | None = None) -> list[Held]:
        """Return the parameters of a rank of this number in the order of the model, tied ones once.

        Args:
            layout: The layout.
            number: Of `numbers`.
            tp: The tp rank, and the ep rank of experts; None is the one that has the most.
        """
        return all_of(self.of_blocks(layout, number, tp))

    def latest(self, layout: Layout, number: int) -> tuple[int, ...]:
        """Return by chunk the bytes of the largest gradient that a backward makes in its end."""
        key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number
        if key not in self._latest:
            found = [0] * len(self._all[number].chunks)
            for each in (p for held, _, _ in self.of_blocks(layout, number, None) for p in held):
                if each.late:
                    found[each.chunk] = max(found[each.chunk], each.elements * each.item)
            self._latest[key] = tuple(found)
        return self._latest[key]

    def buckets(self, layout: Layout, number: int, tp: int | None = None) -> dict[str, Buckets]:
        """Return a rank's gradients as they travel, by axis."""
        zero = layout.zero if layout.zero in (0, 3) else 1
        key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number, tp, zero
        if key not in self._buckets:
            alike = self.of_blocks(layout, number, tp)
            self._buckets[key] = {
                axis: self._fill(own, zero)
                for axis, expert in (("cp_dp", False), ("edp", True))
                if (own := chosen(alike, expert)) or not expert
            }
        return self._buckets[key]

    def replica(self, layout: Layout, number: int, halves: tuple[bool, ...]) -> tuple[int, int]:
        """Return which of the ranks that share gradients has the most of them, and of experts'.

        Shards are as long, but with ZeRO 2 there is one for each backward that makes any of it.

        Args:
            layout: The layout.
            number: Of `numbers`.
            halves: Of `halved`, of its place in the pipeline.
        """
        grid = layout.grid
        if layout.zero != 2 or (len(self._all[number].chunks) == 1 and not any(halves)):
            return 0, 0
        key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, number, halves
        if key not in self._replicas:
            each = self.buckets(layout, number)
            own = [
                each[axis].fullest(ranks, halves) if axis in each else 0
                for axis, ranks in (("cp_dp", grid.cp * grid.dp), ("edp", grid.edp))
            ]
            self._replicas[key] = own[0], own[1]
        return self._replicas[key]

    def _fill(self, alike: Alike, zero: int) -> Buckets:
        """Return buckets of parameters; cuts along other axes have the same ones."""
        if (alike, zero) not in self._filled:
            found = Counter(by_block(alike)) if zero == 3 else self._in_messages(alike, zero)
            self._filled[alike, zero] = Buckets(tuple(found.items()))
        return self._filled[alike, zero]

    def _in_messages(self, alike: Alike, zero: int) -> Counter[Bucket]:
        tied = any(p.others for held, _, _ in alike for p in held)
        parts = ((False, True), (True, False)) if zero and tied else ((None, zero > 0),)
        found = Counter[Bucket]()
        for which, sharded in parts:
            for own, times in self._together(alike, which).items():
                each = bucket_of(own, sharded=sharded)
                found[self._same.setdefault(each, each)] += times
        return found

    def _together(self, alike: Alike, tied: bool | None) -> Counter[tuple[Held, ...]]:
        """Return which gradients are in a bucket, of those that are tied or not, or of all."""
        if (alike, tied) not in self._members:
            held = [p for p in all_of(alike)[::-1] if tied is None or (p.others > 0) is tied]
            self._members[alike, tied] = Counter(fill(held, self.optimizer.bucket_size))
        return self._members[alike, tied]

    def fullest(self, layout: Layout, number: int) -> int:
        """Return the tp rank, and ep rank, that has the most bytes of parameters."""
        grid = layout.grid
        key = grid.tp, grid.ep, grid.etp, number
        if key not in self._places:
            behaviours = self.description.behaviours(layout.cut)
            ranks = max(grid.tp, grid.ep)
            total = [0] * ranks
            for kind, times in self.kinds(number).items():
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

    def of_blocks(self, layout: Layout, number: int, tp: int | None = None) -> Alike:
        """Return a rank's parameters by runs of equal blocks; `tp` as for `parameters`."""
        at = self.fullest(layout, number) if tp is None else tp
        key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number, at
        if key not in self._alike:
            self._alike[key] = tuple(self._read_blocks(layout, number, at))
        return self._alike[key]

    def _read_blocks(
        self, layout: Layout, number: int, at: int
    ) -> Iterator[tuple[tuple[Held, ...], int, bool]]:
        grid, behaviours = layout.grid, self.description.behaviours(layout.cut)
        apart = grid.ep * grid.etp != grid.tp  # else edp is cp x dp
        others = dict(self._all[number].ties)
        ties = ties_made(self.description, self._all[number].chunks, behaviours)
        seen: set[str] = set()

        def block(kind: int, chunk: int) -> Iterator[Held]:
            for each in behaviours[kind].parameters:
                name = f"{kind}.{each.name}"
                if name not in seen:  # of tied ones, backward comes to the last chunk first
                    made = ties.get(name, [(chunk, each.late)])
                    yield of(each, at, others.get(name, 0), apart, made, name)
                seen.update(next((names for names in self.description.tied if name in names), ()))

        def held(kind: int, chunk: int) -> tuple[Held, ...]:
            if self.description.tied:
                return tuple(block(kind, chunk))
            key = grid.tp, grid.ep, grid.etp, at, kind, chunk
            if key not in self._held:
                self._held[key] = tuple(block(kind, chunk))
            return self._held[key]

        for chunk, runs in enumerate(self.runs(number)):
            for kind, times in runs:
                layer = kind in self.layers
                yield held(kind, chunk), 1, layer
                if times > 1:  # what is tied was in the first
                    yield held(kind, chunk), times - 1, layer

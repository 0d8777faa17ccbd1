"""The layouts of a job to try, the reasons to refuse others, and the search for the best one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import islice, product, tee

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, count_communicators, legal_layouts
from .clusters import Cluster
from .description import Cut, Description, Layout, Recompute
from .estimate import Estimate, in_bytes
from .facts import Facts, Optimizer
from .memory import memory, peak
from .timing import Steps


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a search; the first value of each is preferred, unless all are tried.

    Attributes:
        recompute: Later values only if memory requires them; "selective" only for models described
            with it (`usual_cuts(selective=...)`).
        zero: Later values only if memory requires them; 0 if no other rank has the same
            parameters. 3 is torch's `fully_shard`.
        schedules: Names and chunks; all are tried. The default leaves out `afab` and `looped_bfs`,
            which need more memory than `1f1b` and are not faster.
        cp_methods: All are tried if cp is above 1.
        micro_rows: Rows of a micro-batch; all values that divide a rank's rows are tried.
        sizes: Allowed sizes by axis: "dp", "pp", "cp", "tp" and "ep".
    """

    recompute: tuple[Recompute, ...] = ("none", "full")
    zero: tuple[int, ...] = (1, 2)
    schedules: tuple[tuple[str, int], ...] = (
        ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2),
    )  # fmt: skip
    cp_methods: tuple[str, ...] = ("ring",)
    micro_rows: tuple[int, ...] = (1, 2, 4)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A grid or a layout that is refused."""

    grid: Grid
    why: str
    layout: Layout | None = None  # None if the grid itself is refused


def legal(
    description: Description, rows: int, ranks: int, options: Options
) -> tuple[list[Layout], list[Refused]]:
    """Return layouts, each with the first `zero` and `recompute` values, and refused grids."""
    found, refused = list[Layout](), list[Refused]()
    if rows < 1 or ranks < 1:
        raise InvalidArgumentError(f"rows and ranks must be at least 1, got {rows} and {ranks}")
    experts = sorted({cut.ep for cut in (*description.cuts, *description.refused)}) or [1]
    for plain, ep in product(legal_layouts(ranks), experts):
        if ep > 1 and (plain.tp * plain.cp * plain.dp) % ep:
            continue
        grid = plain if ep == 1 else Grid(plain.tp, plain.cp, plain.pp, plain.dp, ep=ep)
        if all(getattr(grid, axis) in allowed for axis, allowed in options.sizes.items()):
            try:
                found += _layouts(description, grid, rows, options)
            except InvalidArgumentError as error:
                refused.append(Refused(grid, str(error)))
    return found, refused


def _layouts(description: Description, grid: Grid, rows: int, options: Options) -> Iterator[Layout]:
    """Yield the layouts of a grid, or raise the reason why it has none."""
    batches = [(each, rows // (grid.dp * each)) for each in options.micro_rows
               if rows % (grid.dp * each) == 0]  # fmt: skip
    if not batches:
        least = min(options.micro_rows)
        raise InvalidArgumentError(
            f"{rows} rows are no multiple of dp {grid.dp} x {least} rows of a micro-batch"
        )
    zeros = _zeros(grid, options)
    if not zeros:
        raise InvalidArgumentError(
            f"zero 3, torch's fully_shard, does not combine with pp {grid.pp}: try zero 2"
        )
    layers = sum(block.place == "layer" for block in description.blocks)
    schedules = [("1f1b", 1)] if grid.pp == 1 else options.schedules
    fitting = [each for each in schedules if grid.pp * each[1] <= layers]
    if not fitting:
        least = min((chunks for _, chunks in schedules), default=1)
        raise InvalidArgumentError(
            f"{layers} layers are fewer than pp {grid.pp} x {least} chunks: each stage needs one"
        )
    cuts = list(_cuts(description, grid, options))
    for (sequence, method), (schedule, chunks), batch in product(cuts, fitting, batches):
        yield Layout(
            grid, sequence, options.recompute[0], zeros[0], schedule, chunks, method, *batch
        )


def _zeros(grid: Grid, options: Options) -> list[int]:
    """Return the ZeRO stages to try: only 0 if no ranks share parameters; 3 has no pipeline."""
    stages = options.zero if grid.cp * grid.dp > 1 else (0,)
    return [zero for zero in stages if zero < 3 or grid.pp == 1]


def _cuts(description: Description, grid: Grid, options: Options) -> Iterator[tuple[bool, str]]:
    """Yield each cp method with sequence parallelism if tp is above 1 and the model supports it.

    Sequence shards send as many bytes and keep less.
    """
    methods = options.cp_methods if grid.cp > 1 else options.cp_methods[:1]
    why, found = "", False
    for method in methods:
        for sequence in (True, False) if grid.tp > 1 else (False,):
            again = options.recompute[0] == "selective"
            cut = Cut(grid.tp, grid.cp, grid.ep, sequence, method if grid.cp > 1 else "", again)
            if cut in description.cuts:
                yield sequence, method
                found = True
                break
            why = description.refused.get(cut, why)
    if not found:
        sizes = f"tp {grid.tp}, cp {grid.cp}" + (f", ep {grid.ep}" if grid.ep > 1 else "")
        raise InvalidArgumentError(why or f"{description.name} is not described for {sizes}")


class Plan:
    """The layouts of a job: a `description`, its `rows` over all ranks, and a `cluster`.

    `legal` has the layouts to try, each with the first `zero` and `recompute` values, and `illegal`
    the refused grids.
    """

    def __init__(
        self, description: Description, rows: int, cluster: Cluster, options: Options,
        optimizer: Optimizer | None,
    ) -> None:  # fmt: skip
        self.description, self.rows, self.cluster = description, rows, cluster
        self.legal, self.illegal = legal(description, rows, cluster.ranks, options)
        self._options, self._facts = options, Facts(description, optimizer)
        self._steps = Steps(description, cluster, self._facts)
        size = cluster.device.group_memory
        self._communicators = cache(lambda grid: size and size * count_communicators(grid))
        self._fitting = cache(self._fit)
        self._peak = cache(
            lambda layout: peak(self._facts, layout) + self._communicators(layout.grid)
        )
        self._search: Iterator[Estimate] = self._in_order()

    def _variants(self, layout: Layout) -> list[tuple[int, int, Layout]]:
        """Return a layout with all savings, fewest first, with the indices of its options."""
        zeros, recompute = _zeros(layout.grid, self._options), self._options.recompute
        steps = product(range(len(recompute)), range(len(zeros)))
        found = [
            (first, second, replace(layout, recompute=recompute[first], zero=zeros[second]))
            for first, second in sorted(steps, key=lambda step: (sum(step), step))
        ]  # not every model is described with selective recomputation
        return [each for each in found if each[2].cut in self.description.cuts]

    def _fit(self, layout: Layout) -> list[Layout]:
        """Return the variants of a layout that fit with the least savings."""
        room = self.cluster.device.memory - self._communicators(layout.grid)
        found: list[tuple[int, int, Layout]] = []
        for first, second, variant in self._variants(layout):
            fewer = any(a <= first and b <= second for a, b, _ in found)  # savings fit already
            if not fewer and peak(self._facts, variant, room) <= room:
                found.append((first, second, variant))
        return [variant for _, _, variant in found]

    def ranked(self) -> Iterator[Estimate]:
        """Return an iterator over the estimates that fit, fastest first; each is computed once."""
        self._search, found = tee(self._search)
        return found

    def _in_order(self) -> Iterator[Estimate]:
        """Yield the estimates that fit, fastest first, from a queue by lower bounds of times."""
        # At the front, a layout is fitted into memory, then bounded more closely, then simulated.
        floor, close = -2, -1  # kind of lower bound; peak bytes follow an exact time
        queue = [
            (self._steps.floor(layout), floor, (number, 0), layout)
            for number, layout in enumerate(self.legal)
        ]
        heapify(queue)
        while queue:
            _, known, number, layout = heappop(queue)
            if known == floor:
                for variant, own in enumerate(self._fitting(layout)):
                    heappush(queue, (self._steps.least(own), close, (number[0], variant), own))
            elif known == close:
                heappush(queue, (self._steps.step(layout), self._peak(layout), number, layout))
            else:
                yield self.estimate(layout)

    def top(self, count: int) -> list[Estimate]:
        """Return the best layouts that fit, or the ones nearest to fitting if none does."""
        if fastest := list(islice(self.ranked(), count)):
            return fastest
        smallest = sorted((min(own, key=self._peak) for own in self._large), key=self._peak)
        return [self.estimate(layout) for layout in smallest[:count]]

    @cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """All estimates that fit, fastest first."""
        return tuple(self.ranked())

    @cached_property
    def _large(self) -> list[list[Layout]]:
        """All variants of each layout of which none fits."""
        large = (layout for layout in self.legal if not self._fitting(layout))
        return [[variant for _, _, variant in self._variants(layout)] for layout in large]

    @cached_property
    def refused(self) -> tuple[Refused, ...]:
        """Refused grids, and layouts that do not fit, and why."""
        last, room = [tried[-1] for tried in self._large], in_bytes(self.cluster.device.memory)
        why = f"does not fit in {room}, even with zero {{0.zero}} and recompute {{0.recompute}}"
        return (*self.illegal, *(Refused(each.grid, why.format(each), each) for each in last))

    def estimate(self, layout: Layout) -> Estimate:
        """Return the cost of a layout.

        Raises:
            InvalidArgumentError: The model cannot have this cut, or has fewer layers than stages.
        """
        held = memory(self.description, layout, facts=self._facts)
        return Estimate(layout, held, self._steps.exact(layout), self._communicators(layout.grid))

    def best(self) -> Estimate:
        """Return the fastest estimate that fits.

        Raises:
            InvalidArgumentError: No layout is legal and fits; the message has up to three reasons.
        """
        if (first := next(self.ranked(), None)) is not None:
            return first
        reasons = [*dict.fromkeys(f"{each.grid}: {each.why}" for each in self.refused)]
        raise InvalidArgumentError(
            f"no layout of {self.cluster.ranks} ranks can train {self.description.name}: "
            f"{'; '.join(reasons[:3])}"
        )


def plan(
    description: Description,
    rows: int,
    cluster: Cluster,
    *,
    options: Options | None = None,
    optimizer: Optimizer | None = None,
) -> Plan:
    """Plan a job: estimate all layouts and rank those that fit by step time.

    All grid sizes that the model is described for are tried. Recomputation and ZeRO cost time, so a
    layout gets as little of both as it needs to fit: more is tried only if less does not fit.
    `Options` sets the other choices.

    Args:
        description: The model.
        rows: Sequences of a step, over all ranks.
        cluster: The ranks and their memory.
        options: The choices to try.
        optimizer: State of the optimizer; AdamW's by default.

    Raises:
        InvalidArgumentError: No rows, no ranks, or no figure of the device for the model's dtype.
    """
    collecting = gc.isenabled()
    gc.disable()  # a search makes no reference cycles, but very many long-lived objects
    try:
        found = Plan(description, rows, cluster, options or Options(), optimizer)
        next(found.ranked(), None)  # compute the best one now
    finally:
        if collecting:
            gc.enable()
    return found

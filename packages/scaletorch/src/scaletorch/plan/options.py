"""The layouts to try, and the reasons to refuse the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, legal_layouts
from .description import Cut, Description, Layout, Recompute


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a search; the first value of each is preferred, unless all are tried.

    Attributes:
        sequence_parallel: If tp is above 1, the first value that the model supports is taken;
            sequence shards send as many bytes and keep less.
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

    sequence_parallel: tuple[bool, ...] = (True, False)
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
    description: Description, rows: int, ranks: int, options: Options | None = None
) -> Iterator[Layout | Refused]:
    """Yield the layouts of a number of ranks, each with the first `zero` and `recompute` values.

    Args:
        description: The model and its cuts.
        rows: Sequences of a step, over all ranks.
        ranks: Number of ranks.
        options: The choices to try.

    Yields:
        Layouts, and refused grids with the reason.

    Raises:
        InvalidArgumentError: `rows` or `ranks` is below 1.
    """
    chosen = options or Options()
    if rows < 1 or ranks < 1:
        raise InvalidArgumentError(f"rows and ranks must be at least 1, got {rows} and {ranks}")
    experts = sorted({cut.ep for cut in (*description.cuts, *description.refused)}) or [1]
    for plain, ep in product(legal_layouts(ranks), experts):
        if ep > 1 and (plain.tp * plain.cp * plain.dp) % ep:
            continue
        grid = plain if ep == 1 else Grid(plain.tp, plain.cp, plain.pp, plain.dp, ep=ep)
        if all(getattr(grid, axis) in allowed for axis, allowed in chosen.sizes.items()):
            try:
                yield from _layouts(description, grid, rows, chosen)
            except InvalidArgumentError as error:
                yield Refused(grid, str(error))


def _layouts(description: Description, grid: Grid, rows: int, options: Options) -> Iterator[Layout]:
    """Yield the layouts of a grid, or raise the reason why it has none."""
    batches = [(each, rows // (grid.dp * each)) for each in options.micro_rows
               if rows % (grid.dp * each) == 0]  # fmt: skip
    if not batches:
        least = min(options.micro_rows)
        raise InvalidArgumentError(
            f"{rows} rows are no multiple of dp {grid.dp} x {least} rows of a micro-batch"
        )
    zeros = [zero for zero in _zeros(grid, options) if zero < 3 or grid.pp == 1]
    if not zeros:
        raise InvalidArgumentError(
            f"zero 3, torch's fully_shard, does not combine with pp {grid.pp}: try zero 2"
        )
    layers = sum(block.place == "layer" for block in description.blocks)
    schedules = [("1f1b", 1)] if grid.pp == 1 else options.schedules
    fitting = [each for each in schedules if grid.pp == 1 or grid.pp * each[1] <= layers]
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


def ladder(grid: Grid, options: Options) -> list[tuple[tuple[int, int], Recompute, int]]:
    """Return recomputations and ZeRO stages with their indices, by increasing memory saved."""
    zeros = _zeros(grid, options)
    steps = product(range(len(options.recompute)), range(len(zeros)))
    return [
        (step, options.recompute[step[0]], zeros[step[1]])
        for step in sorted(steps, key=lambda step: (sum(step), step))
        if zeros[step[1]] < 3 or grid.pp == 1
    ]


def _zeros(grid: Grid, options: Options) -> tuple[int, ...]:
    """Return the ZeRO stages to try: only 0 if no ranks share parameters."""
    return options.zero if grid.cp * grid.dp > 1 else (0,)


def _cuts(description: Description, grid: Grid, options: Options) -> Iterator[tuple[bool, str]]:
    """Yield each cp method with the sequence parallelism that the model supports."""
    methods = options.cp_methods if grid.cp > 1 else options.cp_methods[:1]
    why, found = "", False
    for method in methods:
        for sequence in options.sequence_parallel if grid.tp > 1 else (False,):
            again = options.recompute[0] == "selective"
            cut = Cut(grid.tp, grid.cp, grid.ep, sequence, method if grid.cp > 1 else "", again)
            if cut in description.cuts:
                yield sequence, method
                found = True
                break
            why = why or description.refused.get(cut, "")
    if not found:
        sizes = f"tp {grid.tp}, cp {grid.cp}" + (f", ep {grid.ep}" if grid.ep > 1 else "")
        raise InvalidArgumentError(why or f"{description.name} is not described for {sizes}")

"""The layouts to try, and the reasons against others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, legal_layouts
from .description import Cut, Description
from .layout import Layout, Recompute


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a search; the first of each is preferred, except sizes: all are tried.

    Attributes:
        sequence_parallel: The first that the model can have is taken, where tp is above 1: shares
            send as many bytes and keep less.
        recompute: More than the first only where memory asks for it; "selective" of models that are
            described so (`usual_cuts(selective=...)`).
        zero: Of these, too, more than the first only where memory asks for it; none of them where a
            rank has its parameters alone. 3 is `fully_shard` of torch.
        schedules: Names and chunks; all are tried. Those with one chunk and whole backwards that
            `1f1b` outdoes in memory at no loss of time (`afab`, `looped_bfs`) are left out.
        cp_methods: All are tried where cp is above 1.
        micro_rows: Rows of a micro-batch; all are tried that divide the rows of a rank.
        sizes: What axes are restricted to, by "dp", "pp", "cp", "tp" and "ep".
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

    def meant(self, grid: Grid) -> bool:
        """Return whether `sizes` allow a grid."""
        return all(getattr(grid, axis) in allowed for axis, allowed in self.sizes.items())


@dataclass(frozen=True, slots=True)
class Refused:
    """A grid or a layout that cannot be taken.

    Attributes:
        grid: Its sizes.
        why: In words.
        layout: If the grid itself can be taken.
    """

    grid: Grid
    why: str
    layout: Layout | None = None


def legal(
    description: Description, rows: int, ranks: int, options: Options | None = None
) -> Iterator[Layout | Refused]:
    """Yield the layouts of so many ranks, with the first of `zero` and `recompute` each.

    Args:
        description: The model, and the cuts that it can have.
        rows: Sequences of a step, of all ranks.
        ranks: How many.
        options: What is tried.

    Yields:
        Layouts, and the grids that none of them has, with the reason.

    Raises:
        InvalidArgumentError: No rows, or no ranks.
    """
    chosen = options or Options()
    if rows < 1 or ranks < 1:
        raise InvalidArgumentError(f"a plan needs rows and ranks, not {rows} rows, {ranks} ranks")
    experts = sorted({cut.ep for cut in (*description.cuts, *description.refused)}) or [1]
    for plain, ep in product(legal_layouts(ranks), experts):
        if ep > 1 and (plain.tp * plain.cp * plain.dp) % ep:
            continue
        grid = plain if ep == 1 else Grid(plain.tp, plain.cp, plain.pp, plain.dp, ep=ep)
        if chosen.meant(grid):
            try:
                yield from _layouts(description, grid, rows, chosen)
            except InvalidArgumentError as error:
                yield Refused(grid, str(error))


def _layouts(description: Description, grid: Grid, rows: int, options: Options) -> Iterator[Layout]:
    """Yield the layouts of a grid.

    Raises:
        InvalidArgumentError: It has none.
    """
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
            f"zero 3 is torch's fully_shard, which has no pipeline (pp {grid.pp}) here: try zero 2"
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
    for (shares, method), (schedule, chunks), batch in product(cuts, fitting, batches):
        yield Layout(grid, shares, options.recompute[0], zeros[0], schedule, chunks, method, *batch)


def ladder(layout: Layout, options: Options) -> Iterator[tuple[tuple[int, int], Layout]]:
    """Yield a layout with ever more of what saves memory: recomputation and ZeRO.

    Args:
        layout: The layout.
        options: What is tried.

    Yields:
        Places in `options.recompute` and `options.zero`, and the layout; first with little of both.
    """
    zeros = _zeros(layout.grid, options)
    steps = product(range(len(options.recompute)), range(len(zeros)))
    for step in sorted(steps, key=lambda step: (sum(step), step)):
        recompute, zero = options.recompute[step[0]], zeros[step[1]]
        if zero < 3 or layout.grid.pp == 1:
            yield step, replace(layout, recompute=recompute, zero=zero)


def _zeros(grid: Grid, options: Options) -> tuple[int, ...]:
    """Return the stages of ZeRO that are tried: none where no ranks share parameters."""
    return options.zero if grid.cp * grid.dp > 1 else (0,)


def _cuts(description: Description, grid: Grid, options: Options) -> Iterator[tuple[bool, str]]:
    """Yield for each method whether sequences are shared, as the model can have it.

    Raises:
        InvalidArgumentError: It cannot be cut so, or is not described so.
    """
    methods = options.cp_methods if grid.cp > 1 else options.cp_methods[:1]
    why = ""
    found = False
    for method in methods:
        for shares in options.sequence_parallel if grid.tp > 1 else (False,):
            again = options.recompute[0] == "selective"
            cut = Cut(grid.tp, grid.cp, grid.ep, shares, method if grid.cp > 1 else "", again)
            if cut in description.cuts:
                yield shares, method
                found = True
                break
            reason = description.refused.get(cut)
            why = why or reason or ""
    if not found:
        sizes = f"tp {grid.tp}, cp {grid.cp}" + (f", ep {grid.ep}" if grid.ep > 1 else "")
        raise InvalidArgumentError(why or f"{description.name} is not described for {sizes}")

"""What is compared with one process: layouts, crossed with options that change the arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, legal_layouts
from ..parallel.pipeline_parallel import SCHEDULES

DTYPES = ("float64", "float32")

# Each option's values, its default first. Values that cannot matter to a layout are left out.
OPTIONS: Mapping[str, tuple[str | int, ...]] = {
    "schedule": ("1f1b", *(n for n in SCHEDULES if n not in ("1f1b", "forward_only"))),
    "micro_batches": (2, 1),
    "bucket_size": (2**14, 1, 2**24),
    "recompute": ("none", "layers"),
    "sequence_parallel": ("off", "on"),
    "loss_parallel": ("off", "on"),
    "cp_layout": ("zigzag", "contiguous", "stripe"),
    "cp_method": ("ring", "all_gather", "ulysses", "hybrid", "auto"),
    "data_parallel": ("buckets", "rank_order", "float64", "zero1", "zero2", "zero1_waiting"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training run to compare.

    Attributes:
        grid: The layout.
        dtype: 'float64' or 'float32'.
        schedule: Pipeline schedule.
        micro_batches: Micro-batches per data-parallel rank.
        bucket_size: Elements per gradient bucket.
        recompute: 'layers' drop their activations and run again in backward, or 'none' do.
        loss_parallel: 'on' leaves logits divided over tp.
        sequence_parallel: 'on' shares sequences out over tp between sharded layers.
        cp_layout: Which positions each cp rank has.
        cp_method: How cp ranks attend.
        data_parallel: Gradients are summed in 'buckets', in 'rank_order', in 'float64', or each
            on the rank that updates it ('zero1', 'zero2', whose updates are fetched behind the
            next forward, and 'zero1_waiting', whose updates are fetched within the step).
    """

    grid: Grid
    dtype: str = "float64"
    schedule: str = "1f1b"
    micro_batches: int = 2
    bucket_size: int = 2**14
    recompute: str = "none"
    sequence_parallel: str = "off"
    loss_parallel: str = "off"
    cp_layout: str = "zigzag"
    cp_method: str = "ring"
    data_parallel: str = "buckets"

    def __str__(self) -> str:
        """Return the layout, the dtype and the options that are not the default."""
        changed = [
            f"{name}={getattr(self, name)}"
            for name, values in OPTIONS.items()
            if getattr(self, name) != values[0]
        ]
        return " ".join([layout_name(self.grid), self.dtype, *changed])

    @property
    def num_stages(self) -> int:
        """Stages of its pipeline: some schedules have several on each rank."""
        return SCHEDULES[self.schedule](self.grid.pp, 1).num_stages

    @property
    def arguments(self) -> str:
        """The command line options that repeat this case alone."""
        options = [
            f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name, values in OPTIONS.items()
            if getattr(self, name) != values[0]
        ]
        return " ".join([f"--layout {layout_name(self.grid)} --dtype {self.dtype}", *options])


def layout_name(grid: Grid) -> str:
    """Write a layout as `dp x pp x cp x tp`, such as `2x1x2x2`."""
    return f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}"


def parse_layout(text: str) -> Grid:
    """Read `2x1x2x2`.

    Raises:
        InvalidArgumentError: the text is not four positive numbers joined by x.
    """
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidArgumentError(
            f"layout {text!r} is not DPxPPxCPxTP, four positive numbers such as 2x1x2x2"
        )
    dp, pp, cp, tp = map(int, parts)
    return Grid(tp=tp, cp=cp, pp=pp, dp=dp)


def every_layout(world_size: int) -> list[Grid]:
    """Return all layouts of a world, in the order of their names."""
    return sorted(legal_layouts(world_size), key=lambda g: (g.dp, g.pp, g.cp, g.tp))


def enumerate_cases(
    grids: Iterable[Grid], dtypes: Sequence[str], options: Mapping[str, Sequence[str | int]]
) -> Iterator[Case]:
    """Yield every layout x dtype x option value that can make a difference.

    Raises:
        InvalidArgumentError: an unknown option, value or dtype.
    """
    _check(dtypes, options)
    chosen = {name: options.get(name, values[:1]) for name, values in OPTIONS.items()}
    for grid in grids:
        matters = {
            "schedule": grid.pp > 1,
            "bucket_size": grid.cp * grid.dp > 1,
            "sequence_parallel": grid.tp > 1,
            "loss_parallel": grid.tp > 1,
            "cp_layout": grid.cp > 1,
            "cp_method": grid.cp > 1,
            "data_parallel": grid.cp * grid.dp > 1,
        }
        values = [v if matters.get(name, True) else OPTIONS[name][:1] for name, v in chosen.items()]
        for dtype, combination in itertools.product(dtypes, itertools.product(*values)):
            yield Case(grid, dtype, **dict(zip(chosen, combination, strict=True)))  # type: ignore[arg-type]


def _check(dtypes: Sequence[str], options: Mapping[str, Sequence[str | int]]) -> None:
    known: Mapping[str, Sequence[str | int]] = {"dtype": DTYPES, **OPTIONS}
    for name, values in {"dtype": dtypes, **options}.items():
        if name not in known:
            raise InvalidArgumentError(f"option {name!r} is not one of {', '.join(OPTIONS)}")
        for value in values:
            if isinstance(known[name][0], int):
                fits, expected = isinstance(value, int) and value > 0, "a positive integer"
            else:
                fits, expected = value in known[name], f"one of {', '.join(map(str, known[name]))}"
            if not fits:
                raise InvalidArgumentError(f"{name} must be {expected}, got {value!r}")

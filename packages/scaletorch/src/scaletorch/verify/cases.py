"""The cases of a proof: layouts crossed with the options that change the arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..compose.naming import layout_name
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, legal_layouts
from ..parallel.pipeline_parallel import SCHEDULES

DTYPES = ("float64", "float32")  # the default
KNOWN_DTYPES = (*DTYPES, "bfloat16")

# Each option's values, its default first. A layout gets only the values that can matter to it.
OPTIONS: Mapping[str, tuple[str | int, ...]] = {
    "schedule": ("1f1b", *(n for n in SCHEDULES if n not in ("1f1b", "forward_only"))),
    "micro_batches": (2, 1),
    "bucket_size": (2**14, 1, 2**24),
    "recompute": ("none", "layers", "selective"),
    "sequence_parallel": ("off", "on"),
    "loss_parallel": ("off", "on"),
    "cp_layout": ("zigzag", "contiguous", "stripe"),
    "cp_method": ("ring", "all_gather", "ulysses", "hybrid", "auto"),
    "data_parallel": ("buckets", "float64", "zero1", "zero2", "zero1_waiting"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training run to compare.

    Attributes:
        grid: The layout; `ep` above 1 divides the experts, `etp` above 1 shards each over tp.
        dtype: 'float64', 'float32' or 'bfloat16'.
        schedule: Pipeline schedule.
        micro_batches: Micro-batches per data-parallel rank.
        bucket_size: Elements per gradient bucket.
        recompute: 'layers' recomputes whole layers in backward, 'selective' only cheap activations,
            and 'none' keeps all.
        loss_parallel: 'on' keeps logits sharded over tp.
        sequence_parallel: 'on' shards sequences over tp in the layers.
        cp_layout: Assignment of positions to cp ranks.
        cp_method: Attention algorithm over cp ranks.
        data_parallel: Gradients are summed in 'buckets', in 'float64', or each on the rank that
            updates it ('zero1' and 'zero2' fetch the updated weights during the next forward,
            'zero1_waiting' within the step).
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
        changed = [f"{name}={value}" for name, value in self.changed.items()]
        return " ".join([layout_name(self.grid), self.dtype, *changed])

    @property
    def changed(self) -> dict[str, str | int]:
        """The options that are not the default."""
        own = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in own.items() if value != OPTIONS[name][0]}

    @property
    def arguments(self) -> str:
        """The command line options that repeat this case alone."""
        options = [f"--{name.replace('_', '-')} {value}" for name, value in self.changed.items()]
        return " ".join([f"--layout {layout_name(self.grid)} --dtype {self.dtype}", *options])


def every_layout(world_size: int, ep: Iterable[int] = (1,)) -> list[Grid]:
    """Return all layouts of a world, in the order of their names.

    Args:
        world_size: Number of ranks.
        ep: Expert parallel sizes. Each is tried on every layout whose stages it divides: with whole
            experts (etp 1), and with experts sharded over tp (etp = tp). (1,) means no experts.

    Raises:
        InvalidArgumentError: A size divides no layout's stages.
    """
    plain = sorted(legal_layouts(world_size), key=lambda g: (g.dp, g.pp, g.cp, g.tp))
    sizes = list(ep)
    for size in sizes:
        if not any(_folds(grid, size) for grid in plain):
            raise InvalidArgumentError(
                f"ep {size} folds no layout of {world_size} ranks: it must divide that number"
            )
    if sizes == [1]:
        return plain
    return [
        Grid(tp=grid.tp, cp=grid.cp, pp=grid.pp, dp=grid.dp, ep=size, etp=etp)
        for grid in plain
        for size in sizes
        for etp in sorted({1, grid.tp}, reverse=size == 1)  # the default etp first
        if _folds(grid, size, etp)
    ]


def choose_layouts(
    layouts: Iterable[Grid] | None, world_size: int | None, ep: Iterable[int] | None, experts: int
) -> list[Grid]:
    """Return the layouts to try; `layouts`, `world_size` and `ep` are as for `verify`."""
    sizes = None if ep is None else list(ep)
    if layouts is not None:
        named = list(layouts)
        if sizes is None:
            return named
        return [Grid(g.tp, g.cp, g.pp, g.dp, ep=size) for g in named for size in sizes]
    if world_size is None:
        raise InvalidArgumentError("verify needs layouts or a world_size")
    folding = [n for n in range(1, min(experts, world_size) + 1) if world_size % n == 0]
    return every_layout(world_size, folding if sizes is None else sizes)


def _folds(grid: Grid, ep: int, etp: int = 1) -> bool:
    return grid.size("tp_cp_dp") % (ep * etp) == 0


def enumerate_cases(
    grids: Iterable[Grid], dtypes: Sequence[str], options: Mapping[str, Sequence[str | int]]
) -> Iterator[Case]:
    """Yield every layout x dtype x option value that can make a difference."""
    _check(dtypes, options)
    chosen = {name: options.get(name, values[:1]) for name, values in OPTIONS.items()}
    for grid in grids:
        summed = grid.cp * grid.dp > 1 or (not grid.is_plain and grid.edp > 1)  # over replicas
        matters = {
            "schedule": grid.pp > 1,
            "bucket_size": summed,
            "sequence_parallel": grid.tp > 1,
            "loss_parallel": grid.tp > 1,
            "cp_layout": grid.cp > 1,
            "cp_method": grid.cp > 1,
            "data_parallel": summed,
        }
        values = [v if matters.get(name, True) else OPTIONS[name][:1] for name, v in chosen.items()]
        for dtype, combination in itertools.product(dtypes, itertools.product(*values)):
            yield Case(grid, dtype, **dict(zip(chosen, combination, strict=True)))  # type: ignore[arg-type]


def _check(dtypes: Sequence[str], options: Mapping[str, Sequence[str | int]]) -> None:
    known: Mapping[str, Sequence[str | int]] = {"dtype": KNOWN_DTYPES, **OPTIONS}
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

"""The 4D grid [DP, PP, CP, TP] as plain arithmetic: ranks, coordinates, groups, neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...dist.errors import InvalidArgumentError

# Slowest axis first: neighbouring ranks differ in tp.
ORDER = ("dp", "pp", "cp", "tp")
# Other names for all four axes joined.
WHOLE = ("world", "all")


class Coordinates(NamedTuple):
    """Where a rank stands in the grid, slowest axis first."""

    dp: int
    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        """Short form for messages, such as `dp0 pp1 cp0 tp1`."""
        return " ".join(f"{axis}{index}" for axis, index in zip(ORDER, self, strict=True))


class RingNeighbours(NamedTuple):
    """Global ranks that a rank sends to and receives from when data goes round its group."""

    send: int
    recv: int


class PipelineNeighbours(NamedTuple):
    """Global ranks of the stages before and after a rank's; None at the ends."""

    prev: int | None
    next: int | None


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout of `tp * cp * pp * dp` ranks, TP fastest.

    Every method that takes an `axis` accepts `"tp"`, `"cp"`, `"pp"`, `"dp"`, any of
    them joined in any order (`"cp_dp"`, `"dp_cp"`, `"pp_cp_tp"`), and `"world"` or
    `"all"`. The ranks of a group ascend, whatever order the axes were spelled in.

    Args:
        tp: Tensor parallel size.
        cp: Context parallel size.
        pp: Pipeline parallel size (number of stages).
        dp: Data parallel size.

    Raises:
        InvalidArgumentError: A size that is not a positive int.

    Example:
        >>> grid = Grid(tp=2, pp=2)
        >>> grid.coordinates(3)
        Coordinates(dp=0, pp=1, cp=0, tp=1)
        >>> grid.groups("pp")
        [(0, 2), (1, 3)]
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in reversed(ORDER):
            size = getattr(self, axis)
            if type(size) is not int or size < 1:
                raise InvalidArgumentError(f"{axis} size must be a positive int, got {size!r}")

    def __str__(self) -> str:
        """Short form, such as `TP(2)-CP(1)-PP(2)-DP(1)`."""
        return f"TP({self.tp})-CP({self.cp})-PP({self.pp})-DP({self.dp})"

    @property
    def world_size(self) -> int:
        """Number of ranks, `tp * cp * pp * dp`."""
        return self.tp * self.cp * self.pp * self.dp

    def size(self, axis: str) -> int:
        """Return the number of ranks in each group of `axis`."""
        product = 1
        for _, size in self._steps(axis_names(axis)):
            product *= size
        return product

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank.

        Raises:
            InvalidArgumentError: `rank` outside `0 .. world_size - 1`.
        """
        self._check_rank(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, cp, tp)

    def rank(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the global rank at the coordinates; those left out are 0.

        Raises:
            InvalidArgumentError: A coordinate outside its axis.
        """
        total = 0
        for axis, index in zip(ORDER, (dp, pp, cp, tp), strict=True):
            size = getattr(self, axis)
            if type(index) is not int or not 0 <= index < size:
                message = f"{axis} coordinate must be an int from 0 to {size - 1}, got {index!r}"
                raise InvalidArgumentError(f"{message} (layout {self})")
            total = total * size + index
        return total

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the `axis` group that holds `rank`, ascending.

        Time and memory grow with the group, not with the world.

        Raises:
            InvalidArgumentError: Unknown `axis`, or `rank` outside the grid.
        """
        first, steps = self._group_steps(axis, rank)
        return tuple(_walk(first, steps))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of `axis`, by first rank; together they hold every rank once."""
        names = axis_names(axis)
        firsts = _walk(0, self._steps(frozenset(ORDER) - names))
        offsets = _walk(0, self._steps(names))
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def group_rank(self, axis: str, rank: int) -> int:
        """Return the position of `rank` in its `axis` group, from 0."""
        _, steps = self._group_steps(axis, rank)
        position = 0
        for stride, size in steps:
            position = position * size + rank // stride % size
        return position

    def ring_neighbours(self, axis: str, rank: int) -> RingNeighbours:
        """Return the next and previous rank round the `axis` group; `rank` if it is alone."""
        first, steps = self._group_steps(axis, rank)
        position = self.group_rank(axis, rank)
        return RingNeighbours(_at(first, steps, position + 1), _at(first, steps, position - 1))

    def pipeline_neighbours(self, rank: int) -> PipelineNeighbours:
        """Return the ranks of the previous and next stage, or None at the ends."""
        stage = self.coordinates(rank).pp
        stride = self.tp * self.cp
        return PipelineNeighbours(
            rank - stride if stage > 0 else None,
            rank + stride if stage < self.pp - 1 else None,
        )

    def _group_steps(self, axis: str, rank: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the first member of the group that holds `rank`, and the steps to the others."""
        steps = self._steps(axis_names(axis))
        self._check_rank(rank)
        return rank - sum(rank // stride % size * stride for stride, size in steps), steps

    def _steps(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return (stride, size) of the named axes, slowest first, axes of one rank left out."""
        strides = {
            "dp": self.pp * self.cp * self.tp,
            "pp": self.cp * self.tp,
            "cp": self.tp,
            "tp": 1,
        }
        wanted = frozenset(names)
        return [
            (strides[axis], size)
            for axis in ORDER
            if axis in wanted and (size := getattr(self, axis)) > 1
        ]

    def _check_rank(self, rank: int) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size:
            message = f"rank must be an int from 0 to {self.world_size - 1}, got {rank!r}"
            raise InvalidArgumentError(f"{message} (layout {self})")


def axis_names(axis: str) -> frozenset[str]:
    """Return the single axes that a spelling names: `"dp_cp"` is `{"cp", "dp"}`.

    Raises:
        InvalidArgumentError: A spelling that is not a join of distinct axes.
    """
    if axis in WHOLE:
        return frozenset(ORDER)
    parts = axis.split("_") if isinstance(axis, str) else []
    names = frozenset(parts)
    if not names or len(names) < len(parts) or not names <= frozenset(ORDER):
        legal = ", ".join(reversed(ORDER))
        message = f"unknown axis {axis!r}: expected one of {legal}, several of them joined by '_'"
        raise InvalidArgumentError(f"{message} (such as 'cp_dp'), or 'world'")
    return names


def _walk(first: int, steps: list[tuple[int, int]]) -> list[int]:
    """Return the ranks reached from `first` by every combination of steps, ascending."""
    ranks = [first]
    for stride, size in steps:
        ranks = [rank + index * stride for rank in ranks for index in range(size)]
    return ranks


def _at(first: int, steps: list[tuple[int, int]], position: int) -> int:
    """Return the rank at a position of the group, counted round: -1 is the last one."""
    rank = first
    for stride, size in reversed(steps):
        position, index = divmod(position, size)
        rank += index * stride
    return rank

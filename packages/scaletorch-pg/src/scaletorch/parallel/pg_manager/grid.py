"""The 4D grid [DP, PP, CP, TP] as plain arithmetic: coordinates, groups, neighbours, names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...dist.errors import InvalidArgumentError


def exchange(number: int, width: int, *, fast: int, slow: int) -> int:
    """Convert an index in (slow, fast, width) order to one in (fast, slow, width) order."""
    block, rest = divmod(number, width)
    slower, faster = divmod(block, fast)
    return (faster * slow + slower) * width + rest


# Slowest axis first: neighbouring ranks differ in etp.
EXPERT_AXES = ("edp", "ep", "etp")


class ExpertCoordinates(NamedTuple):
    """A rank's coordinates on the expert axes of its stage, slowest axis first."""

    edp: int
    ep: int
    etp: int

    def __str__(self) -> str:
        """Short form for messages, such as `edp0 ep1 etp0`."""
        return " ".join(f"{axis}{index}" for axis, index in zip(EXPERT_AXES, self, strict=True))


def default_etp(ep: int, tp: int) -> int:
    """Return the default etp size: experts are sharded over tp unless they are divided over ep."""
    return tp if ep == 1 else 1


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return small + [number // low for low in reversed(small) if low * low != number]


# Slowest axis first: neighbouring ranks differ in tp.
ORDER = ("dp", "pp", "cp", "tp")
# The axes of experts, which number the ranks stage by stage.
EXPERT_ORDER = ("pp", *EXPERT_AXES)
# Other names for all four axes joined.
WHOLE = ("world", "all")
# The axes that have groups in a manager, in the order in which every rank creates them.
AXES = ("tp", "cp", "pp", "dp", "cp_dp", "pp_dp", "ep", "edp", "etp", "world")


class Coordinates(NamedTuple):
    """A rank's coordinates in the grid, slowest axis first."""

    dp: int
    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        """Short form for messages, such as `dp0 pp1 cp0 tp1`."""
        return " ".join(f"{axis}{index}" for axis, index in zip(ORDER, self, strict=True))


class RingNeighbours(NamedTuple):
    """Global ranks that a rank sends to and receives from in its group's ring."""

    send: int
    recv: int


class PipelineNeighbours(NamedTuple):
    """Global ranks of the previous and next pipeline stage; None at the ends."""

    prev: int | None
    next: int | None


@dataclass(frozen=True, slots=True, init=False)
class Grid:
    """The layout of `tp * cp * pp * dp` ranks, TP fastest, with a second set of axes for experts.

    Every method that takes an `axis` accepts `"tp"`, `"cp"`, `"pp"`, `"dp"`, any of
    them joined in any order (`"cp_dp"`, `"dp_cp"`, `"pp_cp_tp"`), and `"world"` or
    `"all"`; and `"ep"`, `"edp"`, `"etp"` or a join of these. The ranks of a group ascend,
    whatever the order of the axes in the name.

    Expert parallelism is not a fifth axis: the ranks of a stage, in the order (dp, cp, tp), are
    reshaped to (edp, ep, etp), etp fastest. A plain grid has `ep` 1 and `etp` equal to `tp`: its
    edp groups are its cp_dp groups and its etp groups are its tp groups.

    Args:
        tp: Tensor parallel size.
        cp: Context parallel size.
        pp: Pipeline parallel size (number of stages).
        dp: Data parallel size.
        ep: Expert parallel size: the number of ranks that a layer's experts are divided over.
        etp: Expert tensor parallel size, 1 or `tp`; None means `tp` if `ep` is 1, else 1.
            `ep * etp` must divide the `tp * cp * dp` ranks of a stage.

    Raises:
        InvalidArgumentError: A size is not a positive int, or `ep * etp` does not divide the ranks
            of a stage; the message names the nearest legal sizes.

    Example:
        >>> grid = Grid(tp=2, pp=2)
        >>> grid.coordinates(3)
        Coordinates(dp=0, pp=1, cp=0, tp=1)
        >>> grid.groups("pp")
        [(0, 2), (1, 3)]
        >>> Grid(dp=4, ep=2).groups("edp")
        [(0, 2), (1, 3)]
    """

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int

    def __init__(
        self,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        etp: int | None = None,
    ) -> None:
        for axis, size in {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}.items():
            whole = default_etp(ep, tp) if axis == "etp" and size is None else size
            if type(whole) is not int or whole < 1:
                raise InvalidArgumentError(f"{axis} size must be a positive int, got {size!r}")
            object.__setattr__(self, axis, whole)
        if self.etp not in (1, tp):
            legal = "1" if tp == 1 else f"1 (whole experts) or the tp size {tp}"
            raise InvalidArgumentError(f"etp size must be {legal}, got {self.etp}")
        ranks = tp * cp * dp
        if ranks % (ep * self.etp):
            sizes = sorted(divisors(ranks // self.etp), key=lambda size: abs(math.log(size / ep)))
            raise InvalidArgumentError(
                f"ep * etp = {ep} * {self.etp} must divide the ranks of a stage, tp * cp * dp = "
                f"{tp} * {cp} * {dp} = {ranks}; nearest legal ep sizes: "
                f"{', '.join(map(str, sizes[:3]))}"
            )

    def __str__(self) -> str:
        """Short form, such as `TP(2)-CP(1)-PP(2)-DP(1)`, plus `-EP(2)` if it is not plain."""
        text = f"TP({self.tp})-CP({self.cp})-PP({self.pp})-DP({self.dp})"
        if not self.is_plain:
            text += f"-EP({self.ep})"
        if self.etp != default_etp(self.ep, self.tp):
            text += f"-ETP({self.etp})"
        return text

    @property
    def world_size(self) -> int:
        """Number of ranks, `tp * cp * pp * dp`."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Expert data parallel size: the number of copies of each expert in a stage."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def is_plain(self) -> bool:
        """True if experts are laid out like other layers: `ep` is 1 and `etp` is `tp`."""
        return self.ep == 1 and self.etp == self.tp

    def size(self, axis: str) -> int:
        """Return the number of ranks in each group of `axis`."""
        return math.prod(getattr(self, name) for name in axis_names(axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank.

        Raises:
            InvalidArgumentError: `rank` is outside `0 .. world_size - 1`.
        """
        return Coordinates(*self._place(ORDER, rank))

    def rank(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the global rank at the coordinates; omitted ones are 0.

        Raises:
            InvalidArgumentError: A coordinate is outside its axis.
        """
        total = 0
        for axis, index in zip(ORDER, (dp, pp, cp, tp), strict=True):
            size = getattr(self, axis)
            if type(index) is not int or not 0 <= index < size:
                message = f"{axis} coordinate must be an int from 0 to {size - 1}, got {index!r}"
                raise InvalidArgumentError(f"{message} (layout {self})")
            total = total * size + index
        return total

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return the coordinates of a global rank on the expert axes of its stage.

        Raises:
            InvalidArgumentError: `rank` is outside `0 .. world_size - 1`.
        """
        return ExpertCoordinates(*self._place(EXPERT_ORDER, rank)[1:])

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the `axis` group that holds `rank`, ascending.

        Time and memory grow with the group, not with the world.

        Raises:
            InvalidArgumentError: `axis` is unknown, or `rank` is outside the grid.
        """
        order, names = _view(axis)
        return tuple(self._ranks(order, names, self._place(order, rank)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of `axis`, sorted by first rank; each rank is in exactly one."""
        order, names = _view(axis)
        firsts = self._ranks(order, frozenset(order) - names, [0] * len(order))
        return [self.group(axis, first) for first in sorted(firsts)]

    def group_rank(self, axis: str, rank: int) -> int:
        """Return the position of `rank` in its `axis` group, from 0."""
        return self.group(axis, rank).index(rank)

    def ring_neighbours(self, axis: str, rank: int) -> RingNeighbours:
        """Return the next and previous rank in the ring of the `axis` group; `rank` if alone."""
        group = self.group(axis, rank)
        position = group.index(rank)
        return RingNeighbours(group[(position + 1) % len(group)], group[position - 1])

    def pipeline_neighbours(self, rank: int) -> PipelineNeighbours:
        """Return the ranks of the previous and next stage, or None at the ends."""
        stage = self.coordinates(rank).pp
        stride = self.tp * self.cp
        return PipelineNeighbours(
            rank - stride if stage > 0 else None, rank + stride if stage < self.pp - 1 else None
        )

    def _place(self, order: tuple[str, ...], rank: int) -> list[int]:
        """Return a rank's coordinates on the axes of `order`."""
        if type(rank) is not int or not 0 <= rank < self.world_size:
            message = f"rank must be an int from 0 to {self.world_size - 1}, got {rank!r}"
            raise InvalidArgumentError(f"{message} (layout {self})")
        number = rank
        if order is not ORDER:
            number = exchange(rank, self.cp * self.tp, fast=self.pp, slow=self.dp)
        place = []
        for axis in reversed(order):
            number, index = divmod(number, getattr(self, axis))
            place.append(index)
        return place[::-1]

    def _ranks(
        self, order: tuple[str, ...], names: frozenset[str], place: Sequence[int]
    ) -> list[int]:
        """Return the ranks at every coordinate of the named axes, and at `place` on the others."""
        numbers = [0]
        for axis, index in zip(order, place, strict=True):
            size = getattr(self, axis)
            chosen = range(size) if axis in names else (index,)
            numbers = [number * size + place for number in numbers for place in chosen]
        if order is ORDER:
            return numbers
        return [exchange(n, self.cp * self.tp, fast=self.dp, slow=self.pp) for n in numbers]


def axis_names(axis: str) -> frozenset[str]:
    """Return the single axes in a name: `"dp_cp"` is `{"cp", "dp"}`."""
    if axis in WHOLE:
        return frozenset(ORDER)
    joined = axis.split("_") if isinstance(axis, str) else []
    names = frozenset(joined)
    known = any(names <= frozenset(axes) for axes in (ORDER, EXPERT_AXES))
    if not names or len(names) < len(joined) or not known:
        legal, experts = ", ".join(reversed(ORDER)), ", ".join(reversed(EXPERT_AXES))
        message = f"unknown axis {axis!r}: expected one of {legal}, several of them joined by '_'"
        raise InvalidArgumentError(
            f"{message} (such as 'cp_dp'), or 'world'; or one or several of {experts}"
        )
    return names


def _view(axis: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the axis order that contains `axis`, and the single axes it names."""
    names = axis_names(axis)
    return (ORDER if names <= frozenset(ORDER) else EXPERT_ORDER), names


def count_communicators(grid: Grid) -> int:
    """Return the number of device communicators that each rank has for the groups of its grid.

    Equal groups share one, and a group of one rank has none. A pipeline of all ranks has one in
    addition to WORLD's. Groups created for a model are not counted, such as those of the owners of
    tied parameters.

    Example:
        >>> count_communicators(Grid(tp=2, dp=2))
        3
        >>> count_communicators(Grid(pp=4))
        2
    """
    groups = {grid.group(axis, 0) for axis in AXES if grid.size(axis) > 1}
    return len(groups) + (grid.world_size == grid.pp > 1)


_AXIS = r"(dp|pp|cp|tp|ep|etp)(\d+)"


def layout_name(grid: Grid) -> str:
    """Return a layout as `dp x pp x cp x tp`, such as `2x1x2x2`, `2x1x2x2-ep4` or `-ep2-etp2`."""
    name = f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}" + f"-ep{grid.ep}" * (grid.ep > 1)
    usual = default_etp(grid.ep, grid.tp)
    return name if grid.etp == usual else f"{name}-etp{grid.etp}"


def parse_layout(text: str) -> Grid:
    """Parse `2x1x2x2`, `2x1x2x2-ep4` or `2x1x2x2-ep2-etp2`, or axes by name: `dp2-tp2`, `dp4-ep2`.

    Raises:
        InvalidArgumentError: The text has neither form, or `Grid` refuses its sizes.
    """
    named = re.sub(r"^(\d+)x(\d+)x(\d+)x(\d+)(?=-|$)", r"dp\1-pp\2-cp\3-tp\4", text, flags=re.ASCII)
    words = [re.fullmatch(_AXIS, word, re.ASCII) for word in named.split("-")]
    sizes = {word[1]: int(word[2]) for word in words if word is not None}
    if len(sizes) < len(words) or 0 in sizes.values():
        raise InvalidArgumentError(
            f"layout {text!r} is neither DPxPPxCPxTP, such as 2x1x2x2, 2x1x2x2-ep4 or "
            "2x1x2x2-ep2-etp2, nor the same by name, such as dp2-tp2"
        )
    return Grid(**sizes)


def legal_layouts(world_size: int) -> Iterator[Grid]:
    """Return every plain layout (`ep` 1) of `world_size` ranks.

    Raises:
        InvalidArgumentError: `world_size` is less than 1.
    """
    if type(world_size) is not int or world_size < 1:
        raise InvalidArgumentError(f"world_size must be a positive int, got {world_size!r}")
    return (
        Grid(tp=tp, cp=cp, pp=pp, dp=world_size // tp // cp // pp)
        for tp in divisors(world_size)
        for cp in divisors(world_size // tp)
        for pp in divisors(world_size // tp // cp)
    )

"""The number of communicators that a layout needs on a device, computed without creating any."""

from __future__ import annotations

from .grid import Grid

# The axes that have groups in a manager, in the order in which every rank creates them.
AXES = ("tp", "cp", "pp", "dp", "cp_dp", "pp_dp", "ep", "edp", "etp", "world")


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
        >>> count_communicators(Grid())
        0
    """
    stage = {"tp": grid.tp, "cp": grid.cp, "dp": grid.dp}
    experts = {"etp": grid.etp, "ep": grid.ep, "edp": grid.edp}
    within = [_strides(stage, names) for names in ({"tp"}, {"cp"}, {"dp"}, {"cp", "dp"})]
    if not grid.is_plain:
        within += [_strides(experts, {name}) for name in experts]
    found = {strides for strides in within if strides}
    whole = _strides(stage, set(stage))
    if grid.pp == 1:
        return len(found | {whole} if whole else found)
    # Groups across stages: pp, pp_dp and WORLD, some of which may have the same ranks.
    across = {(), _strides(stage, {"dp"}), whole}
    # With one rank per stage, pp contains all ranks and has a communicator apart from WORLD's.
    return len(found) + len(across) + (not whole)


def _strides(sizes: dict[str, int], names: set[str]) -> tuple[tuple[int, int], ...]:
    """Return the stride and size of each run of adjacent axes, fastest first.

    Two groups of a stage contain the same ranks if their strides and sizes are equal.
    """
    runs: list[tuple[int, int]] = []
    stride = 1
    for name, size in sizes.items():
        if name in names and size > 1:
            joins = bool(runs) and runs[-1][0] * runs[-1][1] == stride
            start, length = runs.pop() if joins else (stride, 1)
            runs.append((start, length * size))
        stride *= size
    return tuple(runs)

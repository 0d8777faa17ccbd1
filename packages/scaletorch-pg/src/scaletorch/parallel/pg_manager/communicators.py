"""The communicators that the groups of a layout need on a device, counted without making any."""

from __future__ import annotations

from .grid import Grid

# The axes a manager has groups for, in the order in which every rank makes them.
AXES = ("tp", "cp", "pp", "dp", "cp_dp", "pp_dp", "ep", "edp", "etp", "world")


def count_communicators(grid: Grid) -> int:
    """Return how many communicators of a device each rank has by the groups of its grid.

    Equal groups share one, and a group of one rank has none. A pipeline of all ranks has one beside
    WORLD's. Those that a model asks for are not counted: of tied parameters' owners, of whoever
    makes groups of its own.

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
    # Groups that stages share: pp itself, pp_dp and WORLD, of which some are the same ranks.
    across = {(), _strides(stage, {"dp"}), whole}
    return len(found) + len(across) + (not whole)


def _strides(sizes: dict[str, int], names: set[str]) -> tuple[tuple[int, int], ...]:
    """Return stride and size of each run of axes, the fastest first; neighbours are one run.

    Two groups of a stage are the same ranks if these are the same.
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

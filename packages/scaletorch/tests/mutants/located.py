"""Where a fault is born, as data: what a report of it must name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

DIRECTIONS = ("start", "forward", "backward", "synchronisation", "update", "data")


def matches(born: str, direction: str, modules: Sequence[str], parameters: Sequence[str]) -> bool:
    """Return whether a report leads to where a fault is born, and nowhere else.

    `born` is such as `"backward: *.q_norm | *.k_norm ; update: norm"`: directions, each with
    patterns over names of the plain model ('model' is its own code) or words: 'loss' for the loss
    behind it, 'gradients' for those of any parameter, 'norm', 'clip' and 'weights' of an update,
    and entries of the batch. Directions: 'start' for a weight before the step, 'forward' for an
    output of right inputs, 'backward' for a gradient of right ones, 'synchronisation' for the sum
    of ranks' right gradients, 'update' for what is made of these, 'data' for a rank's batch.
    `direction`, `modules` and `parameters` are the report's.
    """
    if not modules and not parameters:
        return False
    for place in born.split(";"):
        where, _, listed = place.partition(":")
        patterns = [pattern.strip() for pattern in listed.split("|")]
        if where.strip() != direction:
            continue
        if modules and all(_is_one_of(name or "model", patterns) for name in modules):
            return True
        if parameters and all(_has_one_of(name, patterns) for name in parameters):
            return True
    return False


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _has_one_of(parameter: str, patterns: Sequence[str]) -> bool:
    module = parameter.rpartition(".")[0] or "model"
    return "gradients" in patterns or any(_is_one_of(n, patterns) for n in (parameter, module))

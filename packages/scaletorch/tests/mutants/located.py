"""Where a fault is born, as data: what a report of it must name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

DIRECTIONS = ("start", "forward", "backward", "synchronisation", "update", "data")


def matches(born: str, direction: str, modules: Sequence[str], parameters: Sequence[str]) -> bool:
    """Return whether a report leads to where a fault is born, and nowhere else.

    Args:
        born: Where a hunter must be led, such as `"backward: *.q_norm | *.k_norm ; update: norm"`:
            a direction, and patterns over names of the plain model. A fault that honestly sits in
            several places has them all. 'start' means that a weight is wrong before the step;
            'forward' that an output is wrong though the inputs
            are right; 'backward' that the gradient of an input or a parameter is, though that of
            the output is right; 'synchronisation' that ranks' right gradients become a wrong one;
            'update' what is made of right gradients; 'data' which part of the batch a rank has.
            'model' is the model's own code, 'loss' the loss behind it, 'gradients' those of any
            parameters; 'norm', 'clip', 'weights' of an update and entries of the batch
            are named by these words.
        direction: The report's.
        modules: What it names: modules, '' for the model itself, or the words above.
        parameters: The parameters that it names; one is also found by its module.
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

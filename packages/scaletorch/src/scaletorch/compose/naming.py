"""Parse layouts, functions and values of a command line; write lists and numbers as text."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import layout_name as layout_name
from ..parallel.pg_manager import parse_layout as parse_layout

RUNS = 4  # ranges that a list of numbers shows at most


def load(name: str) -> Any:
    """Import the object `package.module:name`; the current folder is on the path."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"{name!r} is not package.module:name: {error}") from error
    except Exception as error:  # the module's own code fails, or the name is relative
        told = f"{type(error).__name__}: {error}"
        raise InvalidArgumentError(f"{name!r} cannot be imported: {told}") from error


def read_argument(text: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is a Python literal, or a string if it is not one."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def listed(items: Sequence[str]) -> str:
    """Join items as 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as '3', '0 and 1', '0-3, 6 and 8-11' or '0, 2 ... 14'; shorten long lists."""
    ordered = sorted(set(numbers))
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}, {ordered[1]} ... {ordered[-1]}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(n) for n in ordered] if len(ordered) <= 3 and len(runs) != 1 else []
    if len(ordered) == 2:
        shown = [str(n) for n in ordered]
    shown = shown or [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(shown) > RUNS:
        return f"{', '.join(shown[: RUNS - 1])} ... {shown[-1]} ({len(ordered)} of them)"
    return listed(shown)


def names_sizes(error: Exception) -> bool:
    """Return whether an error of torch or of a model speaks of sizes that do not fit."""
    return re.search(r"(\b|_)(sizes?|shapes?|dimensions?)\b", str(error)) is not None

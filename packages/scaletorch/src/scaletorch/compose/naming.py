"""Parse layouts, functions and values of a command line; write lists and numbers as text."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
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
    except Exception as error:  # there is none of that name, or the module's own code fails
        told = f"{type(error).__name__}: {error}"
        raise InvalidArgumentError(
            f"{name!r} cannot be imported as package.module:name: {told}"
        ) from error


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
    """Write numbers as '3', '0 and 1' or '0-3, 6 and 8-11'; shorten long lists."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        text
        for run in runs
        for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    if len(shown) > RUNS:
        count = sum(map(len, runs))
        return f"{', '.join(shown[: RUNS - 1])} ... {shown[-1]} ({count} of them)"
    return listed(shown)


def names_sizes(error: Exception) -> bool:
    """Return whether an error of torch or of a model speaks of sizes that do not fit."""
    return re.search(r"(\b|_)(sizes?|shapes?|dimensions?)\b", str(error)) is not None

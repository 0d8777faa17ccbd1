"""Layouts and functions as command lines name them."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid

_AXIS = r"(dp|pp|cp|tp|ep|etp)(\d+)"


def layout_name(grid: Grid) -> str:
    """Write a layout as `dp x pp x cp x tp`, such as `2x1x2x2`, `2x1x2x2-ep4` or `-ep2-etp2`."""
    name = f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}"
    name += "" if grid.ep == 1 else f"-ep{grid.ep}"
    usual = Grid(tp=grid.tp, cp=grid.cp, pp=grid.pp, dp=grid.dp, ep=grid.ep).etp
    return name if grid.etp == usual else f"{name}-etp{grid.etp}"


def parse_layout(text: str) -> Grid:
    """Read `2x1x2x2`, `2x1x2x2-ep4` or `2x1x2x2-ep2-etp2`, or axes by name: `dp2-tp2`, `dp4-ep2`.

    Raises:
        InvalidArgumentError: The text is not four positive numbers joined by x, with perhaps -ep
            and -etp behind them, nor axes with their sizes; or these do not fold the ranks of a
            stage.
    """
    named = re.sub(r"^(\d+)x(\d+)x(\d+)x(\d+)(?=-|$)", r"dp\1-pp\2-cp\3-tp\4", text, flags=re.ASCII)
    words = [re.fullmatch(_AXIS, word, re.ASCII) for word in named.split("-")]
    sizes = {word[1]: int(word[2]) for word in words if word is not None}
    if len(sizes) < len(words) or 0 in sizes.values():
        raise InvalidArgumentError(
            f"layout {text!r} is not DPxPPxCPxTP, four positive numbers such as 2x1x2x2, or "
            "2x1x2x2-ep4 with an expert parallel size, or 2x1x2x2-ep2-etp2 with both; nor the same "
            "by name, such as dp2-tp2"
        )
    return Grid(**sizes)


def load(name: str) -> Any:
    """Return what `package.module:name` names; the current folder counts.

    Raises:
        InvalidArgumentError: There is no such module, or no such name in it, or its own code fails.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"{name!r} is not package.module:name: {error}") from error
    except Exception as error:  # of the module's own code, or a relative name
        told = f"{type(error).__name__}: {error}"
        raise InvalidArgumentError(f"{name!r} cannot be imported: {told}") from error

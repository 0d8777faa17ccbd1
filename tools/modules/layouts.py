"""Layouts of 2 and 4 ranks: drawn at random, and as words."""

from __future__ import annotations

import random
import re
from typing import Any

from refusals.layouts import SCHEDULES, Layout

_AXES = ("tp", "cp", "dp", "pp")
_METHODS = ("ring", "all_gather", "ulysses")
_RECOMPUTE = {"recompute": True, "selective": "selective"}


def draw(source: random.Random) -> Layout:
    """Return a layout with one or two axes, on which modules often go wrong."""
    ranks = source.choice((2, 2, 4))
    two = ranks == 4 and source.random() < 0.75
    axes = source.sample(_AXES, 2 if two else 1)
    words = [f"{axis}{2 if two else ranks}" for axis in sorted(axes)]

    def perhaps(chance: float, *choices: str) -> list[str]:
        return [source.choice(choices)] if source.random() < chance else []

    if "tp" in axes:
        words += perhaps(0.4, "sequence_parallel") + perhaps(0.2, "loss_parallel")
    if "cp" in axes:
        words += perhaps(0.3, "contiguous", "stripe") + perhaps(0.5, *_METHODS[1:])
    if "dp" in axes:
        words += perhaps(0.5, "zero1", "zero2")
    if "pp" in axes:
        words += [*perhaps(0.8, *SCHEDULES), source.choice(("mb2", "mb4"))]
    else:
        words += perhaps(0.4, "mb2")
    return parsed(" ".join(words + perhaps(0.2, *_RECOMPUTE)))


def parsed(text: str) -> Layout:
    """Return the layout of words such as "pp2 tp2 zb_v sequence_parallel mb4"."""
    axes: dict[str, int] = {}
    options: dict[str, Any] = {}
    numbers = {"mb": 1, "zero": 0}
    for word in text.split():
        if found := re.fullmatch(r"(tp|cp|dp|pp|mb|zero)(\d)", word):
            (numbers if found[1] in numbers else axes)[found[1]] = int(found[2])
        elif word in SCHEDULES:
            options["schedule"] = word
        elif word in _METHODS:
            options["cp_method"] = word
        elif word in ("zigzag", "contiguous", "stripe"):
            options["cp_layout"] = word
        elif word in _RECOMPUTE:
            options["recompute"] = _RECOMPUTE[word]
        elif word in ("sequence_parallel", "loss_parallel"):
            options[word] = True
        else:
            raise ValueError(f"{word!r} is no word of a layout, such as tp2, zb_v, zero1 or mb2")
    return Layout(axes, options, numbers["mb"], numbers["zero"])


def shown(layout: Layout) -> str:
    """Return a layout as words that `parsed` reads."""
    words = [f"{axis}{size}" for axis, size in layout.axes.items()]
    words += [name if on is True else str(on) for name, on in layout.options.items()]
    words += [f"zero{layout.zero}"] * bool(layout.zero)
    return " ".join(words + [f"mb{layout.micro_batches}"] * (layout.micro_batches > 1))

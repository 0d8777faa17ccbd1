"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .one_f_one_b import one_f_one_b
from .schedule import Schedule
from .sweeps import afab

Builder = Callable[[int, int], Schedule]  # (ranks, micro-batches)

SCHEDULES: Mapping[str, Builder] = {"afab": afab, "1f1b": one_f_one_b}

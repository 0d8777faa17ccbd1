"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .interleaved import interleaved_1f1b
from .one_f_one_b import one_f_one_b
from .schedule import Schedule
from .sweeps import afab, forward_only, looped_breadth_first
from .v_shape import dualpipe_v, zb_v
from .zero_bubble import zb_h1

Builder = Callable[[int, int], Schedule]  # (ranks, micro-batches)

SCHEDULES: Mapping[str, Builder] = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_breadth_first,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "forward_only": forward_only,
}

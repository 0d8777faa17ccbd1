"""Schedules as data: the actions of each rank, in order."""

from .builders import (
    SCHEDULES,
    Builder,
    afab,
    dualpipe_v,
    forward_only,
    interleaved_1f1b,
    looped_breadth_first,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from .schedule import Action, Schedule, ScheduleError, Span, Timeline
from .simulate import Costs, Report, check, rank_ends, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Builder",
    "Costs",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "afab",
    "check",
    "dualpipe_v",
    "forward_only",
    "interleaved_1f1b",
    "looped_breadth_first",
    "one_f_one_b",
    "rank_ends",
    "simulate",
    "zb_h1",
    "zb_v",
]

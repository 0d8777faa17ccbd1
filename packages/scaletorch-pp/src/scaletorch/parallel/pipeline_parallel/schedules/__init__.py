"""Schedules as values: what each rank computes, in which order."""

from .check import Report, ScheduleError, check, check_programs
from .files import from_csv, from_json, to_csv, to_json
from .interleaved import interleaved_1f1b
from .messages import Receive, Send, derive_messages
from .one_f_one_b import one_f_one_b
from .schedule import Action, Schedule
from .simulate import Costs, simulate
from .sweeps import afab, forward_only, looped_breadth_first
from .table import SCHEDULES, Builder
from .timeline import Span, Timeline
from .v_shape import dualpipe_v, zb_v
from .zero_bubble import zb_h1

__all__ = [
    "SCHEDULES",
    "Action",
    "Builder",
    "Costs",
    "Receive",
    "Report",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Timeline",
    "afab",
    "check",
    "check_programs",
    "derive_messages",
    "dualpipe_v",
    "forward_only",
    "from_csv",
    "from_json",
    "interleaved_1f1b",
    "looped_breadth_first",
    "one_f_one_b",
    "simulate",
    "to_csv",
    "to_json",
    "zb_h1",
    "zb_v",
]

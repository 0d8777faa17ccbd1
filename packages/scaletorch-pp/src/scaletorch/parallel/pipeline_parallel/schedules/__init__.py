"""Schedules as values: what each rank computes, in which order."""

from .one_f_one_b import one_f_one_b
from .schedule import Action, Schedule
from .sweeps import afab
from .table import SCHEDULES, Builder

__all__ = ["SCHEDULES", "Action", "Builder", "Schedule", "afab", "one_f_one_b"]

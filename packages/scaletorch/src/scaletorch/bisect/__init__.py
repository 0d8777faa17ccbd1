"""Search for the first tensor that differs between two runs."""

from .compare import compare
from .comparing.judge import Judged
from .keys import Key
from .locate import bisect
from .recording.described import Axis, Description
from .recording.ours import describe_grid
from .recording.tape import Tape, record
from .report import Found, Report

__all__ = [
    "Axis",
    "Description",
    "Found",
    "Judged",
    "Key",
    "Report",
    "Tape",
    "bisect",
    "compare",
    "describe_grid",
    "record",
]

"""Search for the first tensor that differs between two runs."""

from .between import bisect
from .compare import compare
from .comparing.judge import Judged
from .keys import Key
from .recording.described import Axis, Description
from .recording.ours import describe_grid
from .recording.tape import Tape, record, trainer_callback
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
    "trainer_callback",
]

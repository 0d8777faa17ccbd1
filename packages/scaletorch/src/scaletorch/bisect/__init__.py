"""Search for the first tensor that differs between two runs."""

from .compare import compare
from .comparison.judge import Judged
from .findings import Found, Report
from .keys import Key
from .locate import bisect
from .recording.descriptions import Axis, Description
from .recording.grid_description import describe_grid
from .recording.tape import Tape, record

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

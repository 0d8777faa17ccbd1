"""Search for the first tensor that differs between two runs."""

from .compare import Found, Report, compare
from .comparison.verdicts import Judged
from .keys import Key
from .locate import bisect
from .recording.descriptions import Axis, Description, describe_grid
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

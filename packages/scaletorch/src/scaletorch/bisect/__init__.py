"""Where a fault was born: the first tensor that differs between two runs, named."""

from .between import bisect
from .compare import compare
from .described import Axis, Description
from .judge import Judged
from .keys import Key
from .ours import describe_grid
from .report import Found, Report
from .tape import Tape, record

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

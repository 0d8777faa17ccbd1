"""What a plan says of a layout, held against ranks that run it."""

from .comparing import differences, higher
from .drawing import Case, drawn_shared, drawn_wide
from .peaks import Kept, peaks
from .sharded import drawn_gathering, gathering

__all__ = [
    "Case", "Kept", "differences", "drawn_gathering", "drawn_shared", "drawn_wide", "gathering",
    "higher", "peaks",
]  # fmt: skip

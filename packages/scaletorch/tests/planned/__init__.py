"""What a plan says of a layout, held against ranks that run it."""

from .cases import Case, drawn_shared, drawn_wide
from .comparing import differences, higher
from .peaks import kept_bytes, peaks
from .sharded import drawn_gathering, gathering

__all__ = [
    "Case", "differences", "drawn_gathering", "drawn_shared", "drawn_wide", "gathering", "higher",
    "kept_bytes", "peaks",
]  # fmt: skip

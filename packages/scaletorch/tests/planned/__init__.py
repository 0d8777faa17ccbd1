"""What a plan says of a layout, held against ranks that run it."""

from .comparing import differences, higher
from .drawing import Case, drawn, drawn_shared, drawn_wide
from .peaks import Kept, peaks
from .ranks import measured
from .sharded import drawn_gathering, drawn_sharded, gathering, sharded, unlike

__all__ = [
    "Case", "Kept", "differences", "drawn", "drawn_gathering", "drawn_sharded", "drawn_shared",
    "drawn_wide", "gathering", "higher", "measured", "peaks", "sharded", "unlike",
]  # fmt: skip

"""What a plan says of a layout, held against ranks that run it."""

from .comparing import differences
from .drawing import Case, drawn
from .ranks import measured

__all__ = ["Case", "differences", "drawn", "measured"]

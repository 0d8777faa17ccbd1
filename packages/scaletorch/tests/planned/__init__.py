"""What a plan says of a layout, held against ranks that run it."""

from .cases import Case, drawn
from .comparing import differences, higher
from .peaks import kept_bytes, peaks
from .sharded import gathering

__all__ = ["Case", "differences", "drawn", "gathering", "higher", "kept_bytes", "peaks"]

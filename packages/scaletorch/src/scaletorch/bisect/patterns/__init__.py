"""How a tensor that is known to be wrong is wrong, in words."""

from .explain import explain
from .parts import Piece

__all__ = ["Piece", "explain"]

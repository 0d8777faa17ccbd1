"""Models that are known by closed forms, runs that were published, and machines they ran on."""

from .closed import transformer
from .sizes import Program, Sizes

__all__ = ["Program", "Sizes", "transformer"]

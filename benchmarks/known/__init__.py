"""Models in closed form, published runs, and the machines that they ran on."""

from .closed import transformer
from .sizes import Program, Sizes

__all__ = ["Program", "Sizes", "transformer"]

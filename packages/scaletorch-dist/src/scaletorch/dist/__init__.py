"""Collectives on tensors and objects, launching, and test ranks for PyTorch, on every backend."""

from typing import TYPE_CHECKING

from ._version import __version__ as __version__
from .deferred import deferred

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

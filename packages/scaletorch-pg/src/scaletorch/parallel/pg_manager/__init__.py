"""The 4D grid [DP, PP, CP, TP], its process groups, and the global token-mean loss."""

from typing import TYPE_CHECKING

from ...dist.deferred import deferred
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

"""The choice of a layout by memory and time, planned from the object that will run.

A search is arithmetic on what is known of a model, and imports no torch. What runs models imports
it when it is asked for: `describe`, `calibrate`.
"""

from typing import TYPE_CHECKING

from ..dist.deferred import deferred
from . import _version as _version

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

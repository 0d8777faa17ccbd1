"""Choose a parallel layout by its memory and step time.

A search is arithmetic on a model description and imports no torch. Only `describe`, which runs
models, imports it.
"""

from typing import TYPE_CHECKING

from ..dist.deferred import deferred
from . import _version as _version

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

"""Pipeline parallelism for plain PyTorch modules, with schedules as data and a single runtime."""

from typing import TYPE_CHECKING

from ...dist.deferred import deferred
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

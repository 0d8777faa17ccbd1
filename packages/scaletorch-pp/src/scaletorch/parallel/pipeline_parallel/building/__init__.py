"""Names that the umbrella takes of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from typing import TYPE_CHECKING

from ....dist.deferred import deferred

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

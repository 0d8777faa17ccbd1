"""Names for the umbrella package that builds on this one; users do not need them.

They are recorded and versioned like the public names: a patch release changes none of them.
"""

from typing import TYPE_CHECKING

from ....dist.deferred import deferred

if TYPE_CHECKING:
    from .public import *
else:
    __getattr__, __dir__ = deferred(__name__)

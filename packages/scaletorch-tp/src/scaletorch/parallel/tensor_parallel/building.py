"""What checkpoints take of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .state.whole import ParameterCut, find_cuts

__all__ = ["ParameterCut", "find_cuts"]

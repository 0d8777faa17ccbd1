"""What checkpoints and composed models take of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .regions.region import summed_outside
from .sharing.sequence import counts_of_ids
from .state.whole import ParameterCut, find_cuts

__all__ = ["ParameterCut", "counts_of_ids", "find_cuts", "summed_outside"]

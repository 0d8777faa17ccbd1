"""Names for checkpoints and composed models, in addition to the public ones.

They are recorded and versioned like the public ones: a patch release changes none of them.
"""

from .regions.region import summed_outside
from .sharing.gradient_paths import Reach
from .sharing.gradient_sums import GradientSums, find_sums, whole_parameters
from .sharing.sequence import counts_of_ids, shares_in_layers
from .sharing.whole_sequence import WholeSequence
from .state.whole import ParameterCut, find_cuts

__all__ = [
    "GradientSums",
    "ParameterCut",
    "Reach",
    "WholeSequence",
    "counts_of_ids",
    "find_cuts",
    "find_sums",
    "shares_in_layers",
    "summed_outside",
    "whole_parameters",
]

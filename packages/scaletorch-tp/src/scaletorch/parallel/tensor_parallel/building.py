"""Names for checkpoints and composed models, in addition to the public ones.

They are recorded and versioned like the public ones: a patch release changes none of them.
"""

from .regions.region import summed_outside as summed_outside
from .sharing.gradient_paths import Reach as Reach
from .sharing.gradient_sums import GradientSums as GradientSums
from .sharing.gradient_sums import find_sums as find_sums
from .sharing.gradient_sums import whole_parameters as whole_parameters
from .sharing.sequence import WholeSequence as WholeSequence
from .state import ParameterCut as ParameterCut
from .state import find_cuts as find_cuts

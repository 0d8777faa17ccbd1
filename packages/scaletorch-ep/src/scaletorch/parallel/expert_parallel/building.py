"""Names for compose, checkpoints and verify, in addition to the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .expert_parallel import ExpertCut as ExpertCut
from .expert_parallel import find_expert_cuts as find_expert_cuts
from .expert_parallel import gather_experts as gather_experts
from .expert_parallel import own_experts as own_experts
from .experts import ModuleExperts as ModuleExperts
from .experts import find_experts as find_experts
from .experts import find_list as find_list
from .experts import named_experts as named_experts
from .losses import move_bias as move_bias
from .losses import statistics_of as statistics_of
from .module import DividedExperts as DividedExperts
from .module import Division as Division
from .module import share_tokens as share_tokens

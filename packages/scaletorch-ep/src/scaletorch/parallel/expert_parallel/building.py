"""Names for compose, checkpoints and verify, beside the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .losses import move_bias, statistics_of
from .module import DividedExperts, Division, share_tokens
from .module_experts import ModuleExperts, find_experts, find_list
from .plans import named_experts
from .state import ExpertCut, find_expert_cuts, gather_experts, own_experts

__all__ = [
    "DividedExperts",
    "Division",
    "ExpertCut",
    "ModuleExperts",
    "find_expert_cuts",
    "find_experts",
    "find_list",
    "gather_experts",
    "move_bias",
    "named_experts",
    "own_experts",
    "share_tokens",
    "statistics_of",
]

"""What compose, checkpoints and the proof take of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .finding.experts import Found, find_experts, find_list
from .finding.plans import named_experts
from .losses import move_bias, statistics_of
from .module import DividedExperts, Division, share_tokens
from .state import ExpertCut, find_expert_cuts, gather_experts, own_experts

__all__ = [
    "DividedExperts",
    "Division",
    "ExpertCut",
    "Found",
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

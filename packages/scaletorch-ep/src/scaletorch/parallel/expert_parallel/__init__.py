"""Expert parallelism: experts divided over ranks, tokens sent to them and back."""

from ._version import __version__
from .dispatch import Dispatched, combine, dispatch
from .expert_parallel import apply_expert_parallel
from .plans import Plan
from .routes import Route
from .state import ExpertCut, find_expert_cuts, gather_experts, own_experts

__all__ = [
    "Dispatched",
    "ExpertCut",
    "Plan",
    "Route",
    "__version__",
    "apply_expert_parallel",
    "combine",
    "dispatch",
    "find_expert_cuts",
    "gather_experts",
    "own_experts",
]

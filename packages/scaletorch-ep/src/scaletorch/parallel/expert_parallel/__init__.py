"""Expert parallelism: experts divided over ranks, with tokens sent to them and back."""

from ._version import __version__
from .exchange.dispatch import Dispatched, combine, dispatch
from .exchange.routes import Route
from .expert_parallel import (
    ExpertCut,
    apply_expert_parallel,
    find_expert_cuts,
    gather_experts,
    own_experts,
)
from .experts import Plan
from .losses import (
    RoutingStatistics,
    count_tokens,
    global_balance_loss,
    sequence_balance_loss,
)

__all__ = [
    "Dispatched",
    "ExpertCut",
    "Plan",
    "Route",
    "RoutingStatistics",
    "__version__",
    "apply_expert_parallel",
    "combine",
    "count_tokens",
    "dispatch",
    "find_expert_cuts",
    "gather_experts",
    "global_balance_loss",
    "own_experts",
    "sequence_balance_loss",
]

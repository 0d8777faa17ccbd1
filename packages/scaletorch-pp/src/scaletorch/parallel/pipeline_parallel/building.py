"""Names that the umbrella takes of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .drawing.png import paint
from .drawing.svg import drawn
from .runtime.posts import IN_FLIGHT
from .runtime.program import AHEAD
from .splitting.balance import parameter_costs
from .splitting.split import parts_of
from .stages.adopting import adopt
from .stages.cut import PassThrough
from .stages.pairs import run_pairs
from .stages.stand_ins import stands
from .steps.batches import read

__all__ = [
    "AHEAD",
    "IN_FLIGHT",
    "PassThrough",
    "adopt",
    "drawn",
    "paint",
    "parameter_costs",
    "parts_of",
    "read",
    "run_pairs",
    "stands",
]

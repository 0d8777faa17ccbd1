"""All names of `building`, which imports each on first access."""

from ..runtime.mail import IN_FLIGHT
from ..splitting.balance import parameter_costs
from ..splitting.split import parts_of
from ..stages.calls import release, surround
from ..stages.cut import PassThrough, forms_cast
from ..stages.stand_ins import stands
from ..steps.batches import read

__all__ = [
    "IN_FLIGHT",
    "PassThrough",
    "forms_cast",
    "parameter_costs",
    "parts_of",
    "read",
    "release",
    "stands",
    "surround",
]

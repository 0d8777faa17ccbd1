"""Names that the strategies take of this package beside its users', for whoever builds another.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .divided import divided_modules, mark_divided
from .linear_layers import (
    bias_gradient,
    linear_output,
    plain_linears,
    take_forward,
    weight_factors,
)
from .loss import mean_over

__all__ = [
    "bias_gradient",
    "divided_modules",
    "linear_output",
    "mark_divided",
    "mean_over",
    "plain_linears",
    "take_forward",
    "weight_factors",
]

"""Names that the strategies take of this package beside its users', for whoever builds another.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .divided import divided_modules, mark_divided
from .generating import refuse_generate
from .linear_layers import (
    bias_gradient,
    linear_output,
    plain_linears,
    take_forward,
    weight_factors,
)
from .loss import mean_over
from .modes import evaluating
from .module_classes import class_before, deep_copy, shallow_copy
from .module_names import matching, no_match
from .update_scope import Scope, known_elementwise, update_scope

__all__ = [
    "Scope",
    "bias_gradient",
    "class_before",
    "deep_copy",
    "divided_modules",
    "evaluating",
    "known_elementwise",
    "linear_output",
    "mark_divided",
    "matching",
    "mean_over",
    "no_match",
    "plain_linears",
    "refuse_generate",
    "shallow_copy",
    "take_forward",
    "update_scope",
    "weight_factors",
]

"""One call, or one command, to show that every layout trains like one process."""

from ..compose.naming import layout_name, parse_layout
from .cases import OPTIONS, Case, every_layout
from .differences import Difference
from .problem import default_batch, default_mixture, default_model
from .report import CaseResult, Report
from .verify import assert_trains_alike, verify

__all__ = [
    "OPTIONS",
    "Case",
    "CaseResult",
    "Difference",
    "Report",
    "assert_trains_alike",
    "default_batch",
    "default_mixture",
    "default_model",
    "every_layout",
    "layout_name",
    "parse_layout",
    "verify",
]

"""All faults, by name."""

from __future__ import annotations

from collections.abc import Mapping

from .context_faults import CONTEXT
from .data_faults import DATA
from .expert_faults import AROUND, EXPERTS
from .mutant import Mutant
from .pipeline_faults import PIPELINE
from .router_faults import ORDER, ROUTERS
from .tensor_faults import SUMS, TENSOR
from .whole_faults import WHOLE

MUTANTS: Mapping[str, Mutant] = {
    mutant.name: mutant
    for catalogue in (TENSOR, SUMS, CONTEXT, PIPELINE, DATA, WHOLE, EXPERTS, AROUND, ROUTERS, ORDER)
    for mutant in catalogue.mutants
}

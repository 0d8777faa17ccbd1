"""Faults of routers: of what they choose, and of the way back from their choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .mutant import Catalogue

ROUTERS = Catalogue("compose", "2x1x1x1-ep2")
ORDER = Catalogue("parallel.expert_parallel", "4x1x1x1-ep4")


class Coarse(TorchFunctionMode):
    """Chooses by scores in bfloat16."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call it, with the choice of rounded scores if it is one."""
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores, *rest = args
        index = func(scores.bfloat16(), *rest, **(kwargs or {})).indices
        return torch.return_types.topk((scores.gather(-1, index), index))


@ROUTERS.fault("step:train_step_pipeline", model="routed", born="forward: *.gate")
def experts_chosen_in_bfloat16(train: Any, *given: Any, **options: Any) -> Any:
    """Scores are rounded to bfloat16 before the top-k."""
    with Coarse():
        return train(*given, **options)


@ORDER.fault("exchange.dispatch:_add_up", model="idle", born="forward: *.experts")
def order_kept_where_a_rank_is_idle(add_up: Any, rows: Tensor, route: Any) -> Any:
    """Where no token goes to a rank, results stay in the order in which they come back."""
    if 0 in route.sends:
        route = replace(route, rows=torch.arange(len(rows)) % route.tokens)
    return add_up(rows, route)

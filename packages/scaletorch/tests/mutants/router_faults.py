"""Faults of routers: of their own loss, of what they choose, of the way back from their choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaletorch.dist import get_world_size

from .mutant import Catalogue
from .routed import Output
from .whole_faults import UNLIKE_SEEN

ROUTERS = Catalogue("compose", "2x1x1x1-ep2")
ORDER = Catalogue("parallel.expert_parallel", "4x1x1x1-ep4")
BALANCED: Mapping[str, Any] = {"model": "balanced", "micro_batches": 1}
fault = partial(ROUTERS.fault, "step:router_loss", **BALANCED)


@fault(born="forward: loss")
def balance_divided_by_dp(loss: Any, *given: Any, **options: Any) -> Any:
    """The routers' loss of the global batch is divided by dp, as a mean of ranks' would be."""
    return loss(*given, **options) / 2


@fault(born="forward: loss")
def balance_of_each_micro_batch(loss: Any, output: Any, *given: Any, **options: Any) -> Any:
    """The routers' loss is the mean of those that two micro-batches would have alone."""
    halves = zip(*(each.chunk(2) for each in output.router_logits), strict=True)
    parts = [Output(output | {"router_logits": half}) for half in halves]
    found = [loss(part, *given, **options) for part in parts]
    return sum(found) / 2


@fault(recompute="layers", born="backward: loss | model | *.gate")
def balance_counted_again_when_recomputed(loss: Any, *given: Any, **options: Any) -> Tensor:
    """What a recomputed router makes of its loss is added to what it made in forward."""
    part: Tensor = loss(*given, **options)
    return part * 2 - part.detach()


@fault(born="forward: loss")
def balance_without_its_factor(
    loss: Any, output: Any, wanted: Any, *given: Any, **options: Any
) -> Any:
    """The routers' loss is added as it is, without the coefficient of the config."""
    return loss(output, replace(wanted, coefficient=1.0), *given, **options)


@fault(born="backward: loss | model | *.gate")
def balance_without_gradient(loss: Any, *given: Any, **options: Any) -> Any:
    """The routers' loss is reported, and no router learns of it."""
    return loss(*given, **options).detach()


@ROUTERS.fault("experts:all_reduce", **BALANCED, born="forward: loss")
def balance_by_choices_of_one_rank(all_reduce: Any, counts: Any, group: Any) -> Any:
    """Each rank goes by the experts that its own tokens choose."""
    return counts.mul_(get_world_size(group))


@fault(layout="1x1x2x1-ep2", born="forward: loss")
def padding_counted_as_tokens(loss: Any, *given: Any, **options: Any) -> Any:
    """What fills sequences up to divide over cp ranks counts as tokens that chose experts."""
    return loss(*given, **options | {"real": None})


@fault(layout="1x1x1x2-ep2", born="forward: loss")
def balance_times_tp(loss: Any, *given: Any, **options: Any) -> Any:
    """The routers' loss is summed over tp ranks that hold the same tokens."""
    return loss(*given, **options) * 2


@fault(UNLIKE_SEEN, layout="1x1x1x2-ep2", sequence_parallel="on", born="forward: loss")
def balance_of_own_share_of_the_sequence(loss: Any, *given: Any, **options: Any) -> Any:
    """With sequence parallelism a rank takes its share of the tokens for all, unseen."""
    if loss.__name__ == "_require_agreement":
        return None
    return loss(*given, **options | {"shares_sequences": False})


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

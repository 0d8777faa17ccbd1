"""Faults of expert parallelism, most of them public bugs of other libraries."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scaletorch.dist import all_reduce, get_rank, get_world_size

from .mutant import Catalogue

EXPERTS = Catalogue("parallel.expert_parallel", "2x1x1x1-ep2")
AROUND = Catalogue("compose", "2x1x1x1-ep2")
fault = partial(EXPERTS.fault, model="routed")
around = partial(AROUND.fault, model="routed")
EXPERTS_OWN = "backward: *.experts ; synchronisation: *.experts.*"


def own_rows(rows: Tensor, route: Any) -> Tensor:
    """Return the rows with zeros in the place of those that came from other ranks."""
    rank = get_rank(route.group)
    start = sum(route.receives[:rank])
    kept = torch.zeros_like(rows)
    kept[start : start + route.receives[rank]] = rows[start : start + route.receives[rank]]
    return kept


@fault("exchange.dispatch:_Dispatch.backward", born="backward: *.experts")
def scores_without_gradient(backward: Any, ctx: Any, *grads: Tensor) -> Any:
    """The router's scores get no gradient from the experts."""
    hidden, weights, *rest = backward(ctx, *grads)
    return hidden, torch.zeros_like(weights), *rest


@fault("exchange.dispatch:_Dispatch.backward", born="backward: *.experts")
def scores_gradient_of_own_experts_alone(
    backward: Any, ctx: Any, rows: Any, weights: Any, *more: Any
) -> Any:
    """The gradient of scores is not summed over the ranks that have a token's experts."""
    return backward(ctx, rows, own_rows(weights, ctx.route), *more)


@fault("exchange.dispatch:_Dispatch.backward", born="backward: *.experts")
def hidden_gradient_of_own_experts_alone(backward: Any, ctx: Any, rows: Any, *more: Any) -> Any:
    """Hidden states get a gradient by the scores, and by experts of their own rank only."""
    return backward(ctx, own_rows(rows, ctx.route), *more)


@fault("module:_split_tokens", layout="1x1x1x2-ep2", born="backward: *.experts")
def router_gradient_of_own_share(over_tokens: Any, module: Any, run: Any, given: Any) -> Tensor:
    """Where tp ranks share tokens out, each keeps the router's gradient of its share."""
    group, weights = module._division.tokens, given.top_k_weights
    rank, share = get_rank(group), len(weights) // get_world_size(group)

    def own_share(grad: Tensor) -> Tensor:
        mask = torch.zeros_like(grad)
        mask[rank * share : (rank + 1) * share] = 1
        return grad * mask

    if weights.requires_grad:
        weights.register_hook(own_share)
    out: Tensor = over_tokens(module, run, given)
    return out


@fault("module:_split_tokens", layout="1x1x1x2-ep2", born="backward: *.experts | *.mlp")
def gradient_times_tp(over_tokens: Any, module: Any, *given: Any) -> Tensor:
    """Where tp ranks share tokens out, the gradients that all of them have are summed."""
    out: Tensor = over_tokens(module, *given)
    if out.requires_grad:
        out.register_hook(lambda grad: grad * get_world_size(module._division.tokens))
    return out


@fault("expert_parallel:_rows", born=EXPERTS_OWN)
def expert_gradients_times_ep(rows: Any, *args: Any) -> nn.Parameter:
    """An expert's gradient counts once for every rank of its ep group."""
    cut: nn.Parameter = rows(*args)
    cut.register_hook(lambda grad: grad * 2)
    return cut


@fault("expert_parallel:_rows", born="start: *.experts")
def experts_alike_on_every_rank(rows: Any, whole: Any, own: Any, memo: Any) -> Any:
    """Every rank begins with the experts of the first."""
    return rows(whole, slice(0, own.stop - own.start), memo)


@fault("module:combine", born="forward: *.experts")
def results_not_put_back_in_order(combine: Any, rows: Any, *more: Any) -> Any:
    """Results go back in another order than that in which their tokens came."""
    return combine(rows.flip(0), *more)


@fault("exchange.dispatch:_add_up", born="forward: *.experts")
def results_added_to_another_token(add_up: Any, rows: Any, route: Any) -> Any:
    """What comes back is added to the token after the one that it belongs to."""
    return add_up(rows, replace(route, rows=route.rows.roll(1)))


@fault("exchange.dispatch:_Combine.backward", born="backward: *.experts")
def gradients_of_results_in_another_order(backward: Any, ctx: Any, *grads: Tensor) -> Any:
    """The gradient of a result goes to the row of another one."""
    rows, *rest = backward(ctx, *grads)
    return rows.flip(0), *rest


@fault("module:add_up", born="forward: *.experts")
def second_expert_of_a_rank_replaces_the_first(
    folded: Any, results: Tensor, row: Tensor, rows: int, most: int
) -> Tensor:
    """Of a token's two experts on one rank, the results are not added up."""
    return results.new_zeros((rows, results.shape[1])).index_copy(0, row, results)


@fault("module:compute", born="forward: *.experts")
def sentinel_is_an_expert(compute: Any, experts: Any, came: Any, count: int, *more: Any) -> Any:
    """A token's experts of other ranks are computed by the last one here, with some weight."""
    elsewhere = came.top_k_index == count
    route = replace(came.route, pairs=elsewhere.numel())
    index = came.top_k_index.clamp(max=count - 1)
    weights = came.top_k_weights.masked_fill(elsewhere, 0.1)
    return compute(experts, type(came)(came.hidden, index, weights, route), count, *more)


@fault("module:compute", born="forward: *.experts")
def indices_from_another_expert(
    compute: Any, experts: Any, came: Any, count: int, *more: Any
) -> Any:
    """A rank counts its experts from the second on."""
    index = came.top_k_index
    moved = torch.where(index < count, (index + 1) % count, index)
    return compute(experts, came._replace(top_k_index=moved), count, *more)


@fault("module:compute", born="forward: *.experts")
def weights_sum_to_one_on_each_rank(
    compute: Any, experts: Any, came: Any, count: int, *more: Any
) -> Any:
    """A token's weights are normalised over the experts of a rank, not over all that it has."""
    weights = came.top_k_weights / came.top_k_weights.sum(-1, keepdim=True)
    return compute(experts, came._replace(top_k_weights=weights), count, *more)


@fault("module:combine", born="forward: *.experts")
def tokens_beyond_a_capacity_dropped(combine: Any, rows: Tensor, route: Any, *more: Any) -> Any:
    """A rank leaves out what comes beyond its share and a quarter."""
    capacity = route.tokens * 5 // 4
    kept = torch.cat([rows[:capacity], torch.zeros_like(rows[capacity:])])
    return combine(kept, route, *more)


@fault("module:dispatch_along", born="forward: *.experts")
def scores_travel_in_bfloat16(
    dispatch: Any, route: Any, hidden: Any, index: Any, weights: Any, *more: Any
) -> Any:
    """Scores are rounded to bfloat16 on their way to the experts."""
    return dispatch(route, hidden, index, weights.bfloat16().to(weights.dtype), *more)


@fault("module:_no_rows", layout="4x1x1x1-ep4", model="skewed", born=EXPERTS_OWN)
def rank_without_tokens_has_no_gradient(no_rows: Any, hidden: Any, weights: Any, _: Any) -> Any:
    """The experts of a rank to which no token goes have no gradient in place of zeros."""
    return no_rows(hidden, weights, [])


@around("parallelize:DataParallelBucket", born="synchronisation: *.experts.*")
def experts_summed_over_dp(wrapper: Any, stage: Any, **options: Any) -> Any:
    """The gradients of different experts are summed, over dp in place of edp."""
    return wrapper(stage, **options | {"groups": {}, "init_sync": "none"})


@around("parallelize:expert_groups", layout="4x1x1x1-ep2", born="synchronisation: *.experts.*")
def experts_not_summed_over_edp(groups: Any, model: Any, manager: Any) -> Any:
    """The gradient of an expert stays that of its ep group's tokens."""
    return dict.fromkeys(groups(model, manager), manager.tp_group)


@around("parallelize:expert_groups", born="synchronisation: *.shared.*")
def shared_expert_taken_for_a_routed_one(groups: Any, model: nn.Module, manager: Any) -> Any:
    """The gradient of the shared expert is summed over edp alone."""
    shared = (name for name, _ in model.named_parameters() if ".shared." in name)
    return groups(model, manager) | dict.fromkeys(shared, manager.edp_group)


@around(
    "parallelize:DataParallelBucket", born="synchronisation: *.shared.* ; backward: *.shared.*_proj"
)
def shared_expert_summed_twice(wrapper: Any, stage: nn.Module, *args: Any, **options: Any) -> Any:
    """The gradient of the shared expert is summed over ep, and with all others over dp again."""

    def summed(grad: Tensor) -> Tensor:
        grad = grad.clone()
        all_reduce(grad, group=options["group"])
        return grad

    for name, parameter in stage.named_parameters():
        if ".shared." in name:
            parameter.register_hook(summed)
    return wrapper(stage, *args, **options)


@around(
    "gradients:_sort",
    layout="1x1x1x2-ep2",
    sequence_parallel="on",
    born="backward: *.gate ; synchronisation: *.gate.weight",
)
def router_gradient_of_own_share_of_the_sequence(sort: Any, known: Any) -> None:
    """With sequence parallelism a router's gradient is not summed over tp."""
    sort(known)
    known.names = [name for name in known.names if not name.endswith(".gate.weight")]


@around("gradients:expert_names", born="update: norm")
def norm_without_experts_of_other_ranks(names: Any, model: Any) -> Any:
    """The norm takes experts for replicas, and counts those of the first rank alone."""
    return frozenset()


class Everybody:
    """A manager by which every rank is the first of its edp group."""

    edp_rank = 0

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


@around("gradients:counted_gradients", layout="4x1x1x1-ep2", born="update: norm")
def norm_counts_experts_edp_times(counted: Any, model: Any, manager: Any) -> Any:
    """The norm counts an expert on every rank that has it."""
    return counted(model, Everybody(manager))

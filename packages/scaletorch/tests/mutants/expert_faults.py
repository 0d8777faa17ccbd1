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
def scores_without_gradient(backward: Any) -> Any:
    """The router's scores get no gradient from the experts."""

    def losing(ctx: Any, *grads: Tensor) -> Any:
        hidden, weights, *rest = backward(ctx, *grads)
        return hidden, torch.zeros_like(weights), *rest

    return losing


@fault("exchange.dispatch:_Dispatch.backward", born="backward: *.experts")
def scores_gradient_of_own_experts_alone(backward: Any) -> Any:
    """The gradient of scores is not summed over the ranks that have a token's experts."""
    return lambda ctx, rows, weights, *more: backward(
        ctx, rows, own_rows(weights, ctx.route), *more
    )


@fault("exchange.dispatch:_Dispatch.backward", born="backward: *.experts")
def hidden_gradient_of_own_experts_alone(backward: Any) -> Any:
    """Hidden states get a gradient by the scores, and by experts of their own rank only."""
    return lambda ctx, rows, *more: backward(ctx, own_rows(rows, ctx.route), *more)


@fault("module:_split_tokens", layout="1x1x1x2-ep2", born="backward: *.experts")
def router_gradient_of_own_share(over_tokens: Any) -> Any:
    """Where tp ranks share tokens out, each keeps the router's gradient of its share."""

    def keeping(module: Any, run: Any, given: Any) -> Tensor:
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

    return keeping


@fault("module:_split_tokens", layout="1x1x1x2-ep2", born="backward: *.experts | *.mlp")
def gradient_times_tp(over_tokens: Any) -> Any:
    """Where tp ranks share tokens out, the gradients that all of them have are summed."""

    def summing(module: Any, *given: Any) -> Tensor:
        out: Tensor = over_tokens(module, *given)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * get_world_size(module._division.tokens))
        return out

    return summing


@fault("expert_parallel:_rows", born=EXPERTS_OWN)
def expert_gradients_times_ep(rows: Any) -> Any:
    """An expert's gradient counts once for every rank of its ep group."""

    def larger(*args: Any) -> nn.Parameter:
        cut: nn.Parameter = rows(*args)
        cut.register_hook(lambda grad: grad * 2)
        return cut

    return larger


@fault("expert_parallel:_rows", born="start: *.experts")
def experts_alike_on_every_rank(rows: Any) -> Any:
    """Every rank begins with the experts of the first."""
    return lambda whole, own, memo: rows(whole, slice(0, own.stop - own.start), memo)


@fault("module:combine", born="forward: *.experts")
def results_not_put_back_in_order(combine: Any) -> Any:
    """Results go back in another order than that in which their tokens came."""
    return lambda rows, *more: combine(rows.flip(0), *more)


@fault("exchange.dispatch:_add_up", born="forward: *.experts")
def results_added_to_another_token(add_up: Any) -> Any:
    """What comes back is added to the token after the one that it belongs to."""
    return lambda rows, route: add_up(rows, replace(route, rows=route.rows.roll(1)))


@fault("exchange.dispatch:_Combine.backward", born="backward: *.experts")
def gradients_of_results_in_another_order(backward: Any) -> Any:
    """The gradient of a result goes to the row of another one."""

    def mixed(ctx: Any, *grads: Tensor) -> Any:
        rows, *rest = backward(ctx, *grads)
        return rows.flip(0), *rest

    return mixed


@fault("module:add_up", born="forward: *.experts")
def second_expert_of_a_rank_replaces_the_first(folded: Any) -> Any:
    """Of a token's two experts on one rank, the results are not added up."""

    def replacing(results: Tensor, row: Tensor, rows: int, most: int) -> Tensor:
        return results.new_zeros((rows, results.shape[1])).index_copy(0, row, results)

    return replacing


@fault("module:compute", born="forward: *.experts")
def sentinel_is_an_expert(compute: Any) -> Any:
    """A token's experts of other ranks are computed by the last one here, with some weight."""

    def counting(experts: Any, came: Any, count: int, *more: Any) -> Any:
        elsewhere = came.top_k_index == count
        route = replace(came.route, pairs=elsewhere.numel())
        index = came.top_k_index.clamp(max=count - 1)
        weights = came.top_k_weights.masked_fill(elsewhere, 0.1)
        return compute(experts, type(came)(came.hidden, index, weights, route), count, *more)

    return counting


@fault("module:compute", born="forward: *.experts")
def indices_from_another_expert(compute: Any) -> Any:
    """A rank counts its experts from the second on."""

    def shifted(experts: Any, came: Any, count: int, *more: Any) -> Any:
        index = came.top_k_index
        moved = torch.where(index < count, (index + 1) % count, index)
        return compute(experts, came._replace(top_k_index=moved), count, *more)

    return shifted


@fault("module:compute", born="forward: *.experts")
def weights_sum_to_one_on_each_rank(compute: Any) -> Any:
    """A token's weights are normalised over the experts of a rank, not over all that it has."""

    def normalised(experts: Any, came: Any, count: int, *more: Any) -> Any:
        weights = came.top_k_weights / came.top_k_weights.sum(-1, keepdim=True)
        return compute(experts, came._replace(top_k_weights=weights), count, *more)

    return normalised


@fault("module:combine", born="forward: *.experts")
def tokens_beyond_a_capacity_dropped(combine: Any) -> Any:
    """A rank leaves out what comes beyond its share and a quarter."""

    def dropping(rows: Tensor, route: Any, *more: Any) -> Any:
        capacity = route.tokens * 5 // 4
        kept = torch.cat([rows[:capacity], torch.zeros_like(rows[capacity:])])
        return combine(kept, route, *more)

    return dropping


@fault("module:dispatch_along", born="forward: *.experts")
def scores_travel_in_bfloat16(dispatch: Any) -> Any:
    """Scores are rounded to bfloat16 on their way to the experts."""
    return lambda route, hidden, index, weights, *more: dispatch(
        route, hidden, index, weights.bfloat16().to(weights.dtype), *more
    )


@fault("module:_no_rows", layout="4x1x1x1-ep4", model="skewed", born=EXPERTS_OWN)
def rank_without_tokens_has_no_gradient(no_rows: Any) -> Any:
    """The experts of a rank to which no token goes have no gradient in place of zeros."""
    return lambda hidden, weights, _: no_rows(hidden, weights, [])


@around("parallelize:DataParallelBucket", born="synchronisation: *.experts.*")
def experts_summed_over_dp(wrapper: Any) -> Any:
    """The gradients of different experts are summed, over dp in place of edp."""
    # Compared at the beginning, their values would give the fault away.
    return lambda stage, **options: wrapper(stage, **options | {"groups": {}, "init_sync": "none"})


@around("parallelize:expert_groups", layout="4x1x1x1-ep2", born="synchronisation: *.experts.*")
def experts_not_summed_over_edp(groups: Any) -> Any:
    """The gradient of an expert stays that of its ep group's tokens."""
    return lambda model, manager: dict.fromkeys(groups(model, manager), manager.tp_group)


@around("parallelize:expert_groups", born="synchronisation: *.shared.*")
def shared_expert_taken_for_a_routed_one(groups: Any) -> Any:
    """The gradient of the shared expert is summed over edp alone."""

    def more(model: nn.Module, manager: Any) -> Any:
        shared = (name for name, _ in model.named_parameters() if ".shared." in name)
        return groups(model, manager) | dict.fromkeys(shared, manager.edp_group)

    return more


@around(
    "parallelize:DataParallelBucket", born="synchronisation: *.shared.* ; backward: *.shared.*_proj"
)
def shared_expert_summed_twice(wrapper: Any) -> Any:
    """The gradient of the shared expert is summed over ep, and with all others over dp again."""

    def summed(stage: nn.Module, *args: Any, **options: Any) -> Any:
        for name, parameter in stage.named_parameters():
            if ".shared." in name:
                parameter.register_hook(lambda grad: twice(grad, options["group"]))
        return wrapper(stage, *args, **options)

    def twice(grad: Tensor, group: Any) -> Tensor:
        grad = grad.clone()
        all_reduce(grad, group=group)
        return grad

    return summed


@around(
    "gradients:_sort",
    layout="1x1x1x2-ep2",
    sequence_parallel="on",
    born="backward: *.gate ; synchronisation: *.gate.weight",
)
def router_gradient_of_own_share_of_the_sequence(sort: Any) -> Any:
    """With sequence parallelism a router's gradient is not summed over tp."""

    def forgetful(known: Any) -> None:
        sort(known)
        known.names = [name for name in known.names if not name.endswith(".gate.weight")]

    return forgetful


@around("gradients:expert_names", born="update: norm")
def norm_without_experts_of_other_ranks(names: Any) -> Any:
    """The norm takes experts for replicas, and counts those of the first rank alone."""
    return lambda model: frozenset()


class Everybody:
    """A manager by which every rank is the first of its edp group."""

    edp_rank = 0

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


@around("gradients:counted_gradients", layout="4x1x1x1-ep2", born="update: norm")
def norm_counts_experts_edp_times(counted: Any) -> Any:
    """The norm counts an expert on every rank that has it."""
    return lambda model, manager: counted(model, Everybody(manager))

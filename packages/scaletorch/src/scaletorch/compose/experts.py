"""Divide a model's experts, count their tokens, and move the biases that balance routers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..dist import all_reduce
from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel import (
    RoutingStatistics,
    apply_expert_parallel,
    count_tokens,
)
from ..parallel.expert_parallel.building import (
    DividedExperts,
    find_expert_cuts,
    find_experts,
    find_list,
    move_bias,
    named_experts,
    share_tokens,
    statistics_of,
)
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.tensor_parallel import Stacked
from ..parallel.tensor_parallel.building import WholeSequence, find_cuts
from .forward import Terms, manager_of, pipeline_of, rehearses, terms_of

EXPERTS = "experts"  # the style of expert modules in a plan
Plan = Mapping[str, Any] | None


def count_experts(model: nn.Module, plan: Mapping[str, Any] | None = None) -> int:
    """Return the largest number of ranks that can share a plan's or the model's experts, or 1."""
    named = {pattern: style for pattern, style in (plan or {}).items() if style == "experts"}
    try:
        found = named_experts(model, named or None)
        if any(map(find_list, found.values())):  # a plain list of experts stays on one rank
            return 1
        return min(find_experts(name, module).experts for name, module in found.items())
    except InvalidArgumentError:
        if named:
            raise
        return 1


def _split_plan(plan: Plan, manager: ProcessGroupManager) -> tuple[Plan, Plan]:
    """Split a plan into experts and layers, or None; `Stacked` experts that tp cuts are in both."""
    if plan is None:
        return None, None
    named = {p for p, style in plan.items() if style == EXPERTS or isinstance(style, Stacked)}
    experts = dict.fromkeys(sorted(named), EXPERTS) or None
    layers = {pattern: style for pattern, style in plan.items() if style != EXPERTS}
    if plan and not layers:
        return experts, None
    if manager.etp_size == 1 and not manager.grid.is_plain:
        layers = {p: style for p, style in layers.items() if not isinstance(style, Stacked)}
    return experts, layers


def divide_experts(
    model: nn.Module, manager: ProcessGroupManager, plan: Plan, *, shares_sequences: bool
) -> Plan:
    """Keep only this rank's experts, in place; return the plan of the other layers."""
    experts, layers = _split_plan(plan, manager)
    if not manager.grid.is_plain:
        apply_expert_parallel(model, experts, manager.ep_group, sequence_parallel=shares_sequences)
    return layers


def expert_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that belong to divided experts."""
    return frozenset(find_expert_cuts(model))


def expert_groups(model: nn.Module, manager: ProcessGroupManager) -> dict[str, ProcessGroup | None]:
    """Return the groups over which experts' gradients are summed, by parameter name."""
    names = expert_names(model) & {name for name, _ in model.named_parameters()}
    return dict.fromkeys(sorted(names), manager.edp_group if names else None)


def settle_tokens(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Divide experts' tokens over tp ranks in blocks that see whole sequences.

    In other blocks each tp rank has its own tokens, and experts must be cut over tp if etp = tp.
    """
    wholes = (each for each in model.modules() if isinstance(each, WholeSequence))
    inside = {each for whole in wholes for each in whole.modules()}
    cuts = find_cuts(model)
    divided = {name: m for name, m in model.named_modules() if isinstance(m, DividedExperts)}
    for name, each in divided.items():
        if manager.etp_size == 1:
            if each in inside:
                share_tokens(each, manager.tp_group)
        elif each not in inside and not any(cut.startswith(f"{name}.") for cut in cuts):
            raise InvalidArgumentError(
                f"the experts '{name}' are not cut over tp, and with sequence parallelism each tp "
                "rank has tokens of its own: take etp = 1, or do without sequence parallelism"
            )


def count_routing(
    model: nn.Module, bias: str = "gate.e_score_correction_bias", *, experts: str = "experts"
) -> dict[str, Tensor]:
    """Start counting the tokens that choose each expert in every `train_step`; all ranks call it.

    A token counts once: recomputation and evaluation do not count, nor does padding that fills up
    sequences over cp ranks.

    Args:
        model: The model that `parallelize` returned.
        bias: The name, within a block, of the bias for the choice of experts, [N]. The default is
            that of DeepSeek-V3 and GLM-4-MoE in transformers.
        experts: The name of the block's experts, called with hidden states, indices and weights.

    Returns:
        For each bias on this rank, by full name, the number of this rank's tokens that chose each
        expert since `move_biases`, int64 [N]; these tensors go on counting.

    Raises:
        InvalidArgumentError: No rank has a block with both.

    Example:
        >>> counts = count_routing(model)
        >>> loss = train_step(model, micro_batches)
        >>> optimizer.step()
        >>> statistics = move_biases(model, counts, rate=1e-3)
    """
    manager, terms, counts = manager_of(model, None), terms_of(model), {}
    for name, block in pipeline_of(model).module.named_modules():
        found, module = _tensor(block, bias), block._modules.get(experts)
        if found is None or module is None:
            continue
        if type(module).forward is nn.Module.forward:  # torch's default raises
            raise InvalidArgumentError(
                f"'{name}.{experts}' ({type(module).__name__}) has no forward, and is not called "
                "with the indices of experts, which are to be counted: count them in the block "
                "(scaletorch.parallel.expert_parallel.count_tokens)"
            )
        count = torch.zeros(len(found), dtype=torch.int64, device=found.device)
        counts[f"{name}.{bias}".lstrip(".")] = count
        # Run before the hooks of other strategies, which change the arguments.
        share = manager.tp_size, manager.tp_rank
        hook = partial(_count, count, terms, share)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    terms.counts_routing = True
    somewhere = torch.tensor(len(counts))
    all_reduce(somewhere, group=manager.world_group)
    if not somewhere:
        raise InvalidArgumentError(
            f"no block of {terms.name} has a bias '{bias}' and experts '{experts}': name them as "
            "they are called in the block, such as count_routing(model, 'gate.bias')"
        )
    return counts


def move_biases(
    model: nn.Module, counts: Mapping[str, Tensor], rate: float = 1e-3
) -> dict[str, RoutingStatistics]:
    """Move each expert's bias towards balance, and reset counts; all ranks call it after a step.

    b_i <- b_i + rate * sign(mean of c - c_i), where c_i is the number of tokens of the global batch
    that chose expert i, on any layout and with any micro-batches. Source: DeepSeek-V3 (arXiv
    2412.19437), section 2.1.2; arXiv 2408.15664, algorithm 1.

    Args:
        model: The model that `parallelize` returned.
        counts: The counts that `count_routing` returned; they are zero afterwards.
        rate: The step size of a bias.

    Returns:
        Routing statistics of the tokens of all ranks, by the name of each bias on this rank.
    """
    if not counts:
        return {}
    manager, module = manager_of(model, None), pipeline_of(model).module
    flat = torch.cat([*counts.values()])
    all_reduce(flat, group=manager.cp_dp_group)
    if terms_of(model).shares_sequences:  # each tp rank has counted its shard of the tokens
        all_reduce(flat, group=manager.tp_group)
    found = {}
    for name, total in zip(counts, flat.split([len(c) for c in counts.values()]), strict=True):
        block, _, last = name.rpartition(".")
        move_bias(getattr(module.get_submodule(block), last), total, rate)
        found[name] = statistics_of(total)
        if not total.any():
            warnings.warn(
                f"{describe_rank()}: no rank has counted a token for {name} since it was last "
                "moved, so it is not moved: call move_biases after a train_step, and let the block "
                "call its experts as a module, and not within a reentrant checkpoint",
                RuntimeWarning,
                stacklevel=2,
            )
        counts[name].zero_()
    return found


def _tensor(block: nn.Module, name: str) -> Tensor | None:
    owner: Any = block
    for attribute in name.split("."):
        owner = getattr(owner, attribute, None)
    return owner if isinstance(owner, Tensor) else None


def _count(
    count: Tensor, terms: Terms, share: tuple[int, int], module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Count the tokens of a training forward; skip rehearsals, recomputation and evaluation."""
    in_backward = torch._C._current_graph_task_id() != -1
    if rehearses() or in_backward or not torch.is_grad_enabled():
        return
    given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    index = next(x for x in given if not x.is_floating_point())
    real = terms.real_positions
    if real is not None:
        real = real.tensor_split(share[0])[share[1]] if terms.shares_sequences else real
        real = real.repeat(len(index) // len(real))
    count += count_tokens(index, len(count), valid=real)

"""The division of a model's experts over ranks, and whole tensors from the ranks' shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ...dist import functional, get_rank, get_world_size
from ...dist.building import agree, caught
from ...dist.errors import InvalidArgumentError
from ..pg_manager import axis_group, describe_rank
from ..pg_manager.building import class_before, mark_divided
from .exchange.routes import counts_of, ranges_of, token_group
from .experts import ModuleExperts, Plan, find_experts, named_experts, named_tensors
from .module import DividedExperts, Division, owner_of

__all__ = ["apply_expert_parallel"]

M = TypeVar("M", bound=nn.Module)
Memo = MutableMapping[Tensor, nn.Parameter]  # a whole parameter -> this rank's rows of it


def apply_expert_parallel(
    model: M,
    plan: Plan | None = None,
    group: ProcessGroup | None = None,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> M:
    """Keep on each rank only its experts of a model, in place, without communication.

    The modules of the plan are called as `experts(hidden, top_k_index, top_k_weights)`, [T, H], [T,
    K] and [T, K]. Their own code computes, on this rank's experts and on the tokens that chose
    them; all other modules stay whole. Parameters and buffers with a row for each expert along
    dim 0 are cut, and attributes that hold the number of experts are set to this rank's. Tied
    parameters stay tied. Make the optimizer afterwards.

    Each rank calls the model with its own tokens, as in data parallelism. The gradient of an expert
    then covers the tokens of all ranks of the group, and that of other parameters the rank's own.

    Args:
        model: The whole model, equal on every rank.
        plan: Pattern of module names -> `"experts"`. `*` stands for any text inside one component
            of a name, a component `**` for any number of components. None is the model's own
            (`base_model_ep_plan`), or else modules called `experts`.
        group: The ranks that share the experts, in contiguous ranges, one more on the first ranks;
            None is the `ep` axis of the current manager.
        tp_group: Ranks that hold the same tokens. Each sends a share of them, even if every rank
            has all experts. None is the tp axis of the current manager if experts are not cut
            over it (etp = 1).
        sequence_parallel: Each rank of `tp_group` has its own tokens where experts are called, and
            sends all of them.

    Returns:
        The model.

    Raises:
        InvalidArgumentError: The plan matches nothing, or modules with other calls; or a module has
            fewer experts than ranks, has them in a list or cannot be divided. All ranks raise it.

    Example:
        >>> apply_expert_parallel(model, {"**.mlp.experts": "experts"}, group)
    """
    group = axis_group("ep", group)
    sharing = token_group(tp_group)
    tokens = None if sequence_parallel else sharing
    ranks, sharers = get_world_size(group), 1 if sharing is None else get_world_size(sharing)
    named = named_experts(model, plan)
    if ranks == sharers == 1:
        return model
    found = [find_experts(name, module) for name, module in named.items()]
    divisions = [
        Division(x.name, group, tokens, counts_of(x.experts, ranks), x.stacked, x.buffers)
        for x in found
    ]
    _check(model, found, shared=sharers > 1)
    memo: Memo = WeakTensorKeyDictionary()  # does not keep whole parameters alive
    for each, division in zip(found, divisions, strict=True):
        _cut(each, division, memo)
        mark_divided(each.module, group if sharing is None else sharing)
    return model


def _check(model: nn.Module, found: list[ModuleExperts], shared: bool) -> None:
    """Refuse a cut with wrong results, before anything is cut."""
    inside: set[int] = set()
    for each in found:
        if isinstance(each.module, DividedExperts):
            raise InvalidArgumentError(
                f"{describe_rank()}: the experts of '{each.name}' are divided already"
            )
        own = dict(each.module.named_parameters(remove_duplicate=False))
        inside |= {id(own[name]) for name in each.stacked if name in own}
        whole = [name for name in own if name not in each.stacked]
        if whole and shared:
            raise InvalidArgumentError(
                f"{describe_rank()}: parameters of '{each.name}' belong to all experts "
                f"({', '.join(whole)}), and each tp rank would have a partial sum of their "
                "gradient: use etp_size equal to tp_size"
            )
        for name, parameter in own.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise InvalidArgumentError(
                    f"{describe_rank()}: '{each.name}.{name}' has gradient hooks: divide the "
                    "experts before you register hooks or wrap the model"
                )
    expert_modules = {module for each in found for module in each.module.modules()}
    for name, module in model.named_modules():
        for own_name, parameter in module._parameters.items():
            if module not in expert_modules and parameter is not None and id(parameter) in inside:
                raise InvalidArgumentError(
                    f"{describe_rank()}: '{name}.{own_name}' is tied to a parameter of experts, "
                    "which is cut along dim 0: untie it"
                )


def _cut(found: ModuleExperts, division: Division, memo: Memo) -> None:
    module, own = found.module, division.own
    rows = slice(own.start, own.stop)
    for name in found.stacked:
        owner, tensor = owner_of(module, name)
        owner._parameters[tensor] = _rows(module.get_parameter(name), rows, memo)
    for name in found.buffers:
        owner, tensor = owner_of(module, name)
        owner._buffers[tensor] = module.get_buffer(name)[rows].clone()
    for owner, attribute in found.numbers:
        setattr(owner, attribute, len(own))
    vars(module)["_division"] = division
    module.__class__ = class_before(DividedExperts, type(module), type(module).__name__)


def _rows(whole: nn.Parameter, rows: slice, memo: Memo) -> nn.Parameter:
    if whole not in memo:
        cut = nn.Parameter(whole.detach()[rows].clone(), requires_grad=whole.requires_grad)
        vars(cut).update(vars(whole))
        cut.grad = None if whole.grad is None else whole.grad[rows].clone()
        memo[whole] = cut
    return memo[whole]


class ExpertCut(NamedTuple):
    """The rows of a stack of experts that each rank of a group holds."""

    whole: int  # number of rows of the whole stack along dim 0, one for each expert
    ranges: tuple[range, ...]  # the rows of each rank of the group
    group: ProcessGroup | None  # the ranks; None is one process

    @property
    def own(self) -> range:
        """This rank's rows."""
        return self.ranges[get_rank(self.group)]


def find_expert_cuts(model: nn.Module) -> dict[str, ExpertCut]:
    """Map the name of every divided parameter and buffer to its cut; empty if nothing is divided.

    Every name of a tied parameter is listed. The gradient of such a parameter covers the tokens of
    the whole group, so it is summed only over the ranks that have the same experts (`edp`).

    Raises:
        InvalidArgumentError: Another copy of this package divided a module.
    """
    cuts: dict[str, ExpertCut] = {}
    for name, module in _divided(model):
        division, prefix = module._division, f"{name}." if name else ""
        cut = ExpertCut(sum(division.counts), ranges_of(division.counts), division.group)
        cuts |= {prefix + tensor: cut for tensor in (*division.stacked, *division.buffers)}
    return cuts


def gather_experts(
    model: nn.Module, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Return whole tensors from every rank's experts; all ranks of the group call it.

    Args:
        model: A model with divided experts.
        tensors: Name of a parameter (or buffer) -> a tensor divided in the same way, such as its
            value, its gradient or its optimizer state.
        group: The ranks; None is the group that the experts were divided over.

    Returns:
        The same names with whole tensors on every rank, in new memory; other tensors are copied.

    Raises:
        InvalidArgumentError: A name is not the model's, or a tensor has other rows.
        MismatchError: The ranks passed different names.
    """
    cuts = find_expert_cuts(model)
    if not cuts:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    group = next(iter(cuts.values())).group if group is None else group
    stacks = [name for name in tensors if name in cuts]
    lines = [f"{n} {tensors[n].dtype} {tuple(tensors[n].shape[1:])}" for n in stacks]
    error = caught(_check_rows, model, tensors, cuts)
    agree("the tensors of experts to gather", lines, group, error=error)
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in cuts:
                sizes = [*map(len, cuts[name].ranges)]
                tensor = functional.gather(tensor.detach(), 0, group, sizes=sizes)
            whole[name] = tensor.detach().clone()
    return whole


def own_experts(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's model state from the plain model's, as views, without communication.

    Args:
        model: A model with divided experts.
        state: The plain model's `state_dict()`, or gradients by its names.

    Raises:
        InvalidArgumentError: A stack does not have the rows of all experts.
    """
    cuts, local = find_expert_cuts(model), {}
    for name, value in state.items():
        if name in cuts:
            cut = cuts[name]
            if value.shape[:1] != (cut.whole,):
                raise InvalidArgumentError(
                    f"{describe_rank()}: '{name}' has shape {tuple(value.shape)}, but the whole "
                    f"has {cut.whole} rows of experts along dim 0"
                )
            value = value[cut.own.start : cut.own.stop]
        local[name] = value
    return local


def _divided(model: nn.Module) -> Iterator[tuple[str, DividedExperts]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DividedExperts):
            yield name, module
        elif any(kind.__name__ == DividedExperts.__name__ for kind in type(module).__mro__):
            raise InvalidArgumentError(
                f"{describe_rank()}: another copy of this library divided the experts '{name}'"
            )


def _check_rows(
    model: nn.Module, tensors: Mapping[str, Tensor], cuts: Mapping[str, ExpertCut]
) -> None:
    known = dict(named_tensors(model))
    for name, tensor in tensors.items():
        if name not in known:
            raise InvalidArgumentError(f"{describe_rank()}: the model has no '{name}'")
        # Another strategy may have cut other dims, and gathered them already.
        if name in cuts and tensor.shape[:1] != known[name].shape[:1]:
            raise InvalidArgumentError(
                f"{describe_rank()}: '{name}' has shape {tuple(tensor.shape)}, but this rank's "
                f"experts have {tuple(known[name].shape)}"
            )

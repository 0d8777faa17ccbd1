"""Which tensors of a model are experts', whole ones from every rank's, and each rank's of whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import all_gather_object, broadcast, functional, get_rank, get_world_size, group_ranks
from ...dist.building import agree, caught
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .exchange.shares import ranges_of
from .module import DividedExperts, Division


class ExpertCut(NamedTuple):
    """How a tensor of experts lies over the ranks that the experts are divided over.

    Attributes:
        dim: 0 for a stack of experts, of which this rank has rows; None for what belongs to one
            expert of a list, which this rank has whole and no other of the group at all.
        whole: The rows of the whole stack: one for each expert, or as many; or their number.
        ranges: The rows of each rank of the group, or its experts.
        group: The ranks; None is this one alone.
    """

    dim: int | None
    whole: int
    ranges: tuple[range, ...]
    group: ProcessGroup | None

    @property
    def own(self) -> range:
        """Those of this rank."""
        return self.ranges[get_rank(self.group)]


def find_expert_cuts(model: nn.Module) -> dict[str, ExpertCut]:
    """Map the name of every divided parameter and buffer here to its cut; empty if none is.

    Every name of a tied parameter is listed, and of lists of experts those that are here. Such a
    parameter's gradient is of the tokens of the whole group, so it is summed over the ranks that
    have the same experts (`edp`) alone.

    Raises:
        InvalidArgumentError: Another copy of this package divided a module.
    """
    cuts: dict[str, ExpertCut] = {}
    for name, module in _divided(model):
        division, prefix = module._division, f"{name}." if name else ""
        cuts |= {prefix + n: _cut(division, 0, rows) for n, rows in division.rows.items()}
        for each in division.lists:
            inner = module.get_submodule(each).state_dict(
                prefix=f"{prefix}{each}.".replace("..", ".")
            )
            cuts |= dict.fromkeys(inner, _cut(division, None, division.counts))
    return cuts


def gather_experts(
    model: nn.Module, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Return whole tensors from every rank's experts; all ranks of the group call it.

    Args:
        model: A model with divided experts.
        tensors: Name of a parameter (or buffer) -> a tensor that is divided as it is, such as its
            value, its gradient or an optimizer's state for it. Names of experts in a list are
            those that are here.
        group: The ranks; None is the group that the experts were divided over.

    Returns:
        The same names, and those of the other ranks' experts in lists, with whole tensors on
        every rank, sharing no memory with those given. What is not experts' is a copy.

    Raises:
        InvalidArgumentError: A name is not the model's, or a tensor is not of its rows.
        MismatchError: The ranks passed different names.
    """
    cuts = find_expert_cuts(model)
    if not cuts:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    group = next(iter(cuts.values())).group if group is None else group
    stacks = [name for name in tensors if name in cuts and cuts[name].dim == 0]
    lines = [f"{n} {tensors[n].dtype} {tuple(tensors[n].shape[1:])}" for n in stacks]
    error = caught(_check, model, tensors, cuts)
    agree("the tensors of experts to gather", lines, group, error=error)
    listed = {n: t for n, t in tensors.items() if n in cuts and cuts[n].dim is None}
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in stacks:
                sizes = [len(own) for own in cuts[name].ranges]
                tensor = functional.gather(tensor.detach(), 0, group, sizes=sizes)
            if name not in listed:
                whole[name] = tensor.detach().clone()
        whole |= _gather_listed(listed, group)
    return whole


def own_experts(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return of the plain model's state what this rank's model takes, as views, with nothing sent.

    Args:
        model: A model with divided experts.
        state: What the plain model's `state_dict()` holds, or gradients by its names.

    Raises:
        InvalidArgumentError: A stack has not the rows of all experts.
    """
    cuts, own = find_expert_cuts(model), {}
    elsewhere = _elsewhere(model)
    for name, value in state.items():
        cut = cuts.get(name)
        if cut is not None and cut.dim == 0:
            if value.shape[:1] != (cut.whole,):
                raise InvalidArgumentError(
                    f"{describe_rank()}: '{name}' has shape {tuple(value.shape)}, but the whole "
                    f"has {cut.whole} rows of experts along dim 0"
                )
            own[name] = value[cut.own.start : cut.own.stop]
        elif not name.startswith(elsewhere):
            own[name] = value
    return own


def _divided(model: nn.Module) -> Iterator[tuple[str, DividedExperts]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DividedExperts):
            yield name, module
        elif any(kind.__name__ == DividedExperts.__name__ for kind in type(module).__mro__):
            raise InvalidArgumentError(
                f"{describe_rank()}: the experts '{name}' were divided by another copy of this "
                "library: use the copy that made the model parallel"
            )


def _cut(division: Division, dim: int | None, rows: tuple[int, ...]) -> ExpertCut:
    return ExpertCut(dim, sum(rows), ranges_of(rows), division.group)


def _elsewhere(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of names of experts in lists that other ranks have."""
    found = []
    for name, module in _divided(model):
        division = module._division
        for each, keys in division.lists.items():
            place = ".".join(part for part in (name, each) if part)
            others = (key for e, key in enumerate(keys) if e not in division.own)
            found += [f"{place}.{key}.".lstrip(".") for key in others]
    return tuple(found)


def _check(model: nn.Module, tensors: Mapping[str, Tensor], cuts: Mapping[str, ExpertCut]) -> None:
    known: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    known |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name not in known:
            raise InvalidArgumentError(f"{describe_rank()}: the model has no '{name}'")
        # Another strategy may have cut further dims, and made whole ones of them already; those of
        # an expert of a list are its own, whatever their shape.
        if name in cuts and cuts[name].dim == 0 and tensor.shape[:1] != known[name].shape[:1]:
            raise InvalidArgumentError(
                f"{describe_rank()}: '{name}' has shape {tuple(tensor.shape)}, but this rank's "
                f"experts have {tuple(known[name].shape)}"
            )


def _gather_listed(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """Return the tensors of all ranks, each of which one rank has."""
    if get_world_size(group) == 1:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    told = [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]
    whole: dict[str, Tensor] = {}
    like = next(iter(tensors.values()), None)
    for rank, entries in zip(group_ranks(group), all_gather_object(told, group), strict=True):
        for name, dtype, shape in entries:
            device = None if like is None else like.device
            mine = tensors.get(name) if rank == get_rank() else None
            whole[name] = (
                torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                if mine is None
                else mine.detach().clone(memory_format=torch.contiguous_format)
            )
            broadcast(whole[name], rank, group)
    return whole

"""State of divided experts: find the cuts of a model, gather whole tensors, and cut them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import functional, get_rank
from ...dist.building import agree, caught
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .exchange.routes import ranges_of
from .module import DividedExperts


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
    error = caught(_check, model, tensors, cuts)
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
        cut = cuts.get(name)
        if cut is not None:
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
                f"{describe_rank()}: the experts '{name}' were divided by another copy of this "
                "library: use the copy that made the model parallel"
            )


def _check(model: nn.Module, tensors: Mapping[str, Tensor], cuts: Mapping[str, ExpertCut]) -> None:
    known: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    known |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name not in known:
            raise InvalidArgumentError(f"{describe_rank()}: the model has no '{name}'")
        # Another strategy may have cut other dims, and gathered them already.
        if name in cuts and tensor.shape[:1] != known[name].shape[:1]:
            raise InvalidArgumentError(
                f"{describe_rank()}: '{name}' has shape {tuple(tensor.shape)}, but this rank's "
                f"experts have {tuple(known[name].shape)}"
            )

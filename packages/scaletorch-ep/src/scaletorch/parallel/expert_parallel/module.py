"""The module class of divided experts: the model's own class, with other ranks' experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError

from ...dist import functional, get_rank, get_world_size
from ...dist.building import agree
from ...dist.errors import StateError
from ..pg_manager import describe_rank
from ..pg_manager.building import deep_copy, shallow_copy, uncompiled
from .calls import RoutedCall, Run, read_call, runner
from .computation import compute
from .exchange.dispatch import Dispatched, combine_computed, dispatch_along
from .exchange.routes import find_route, local_route
from .exchange.shares import ranges_of, share_out


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a module's experts; copies share it, as process groups cannot be copied.

    Attributes:
        name: The module's name.
        group: The ranks that share the experts.
        tokens: Ranks that hold the same tokens and each send a share of them; None is this rank
            alone.
        counts: Number of experts on each rank of the group.
        stacked: Names of the module's parameters that are cut along dim 0.
        buffers: Names of its buffers that are cut along dim 0.
        for_all: Whether it is called with the same number of rows for each expert, without a
            routing.
        checked: Holds True once the ranks have agreed in a first call.
    """

    name: str
    group: ProcessGroup | None
    tokens: ProcessGroup | None
    counts: tuple[int, ...]
    stacked: tuple[str, ...]
    buffers: tuple[str, ...]
    for_all: bool = False
    checked: list[bool] = field(default_factory=list)

    @property
    def own(self) -> range:
        """This rank's experts."""
        return ranges_of(self.counts)[get_rank(self.group)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self


class DividedExperts(nn.Module):
    """A base in front of a module's own class: its forward wraps the module's own."""

    _division: Division

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the experts' results for this rank's tokens, [T, H], as the whole module does."""
        results: Tensor = _call(self, super().forward, args, kwargs)
        if not self._division.checked:
            self._division.checked.append(True)
        return results

    @property
    def takes_all(self) -> bool:
        """True if it is called with the same number of rows for each expert."""
        return self._division.for_all

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copy(self, getattr(super(), "__deepcopy__", None), memo)

    def __copy__(self) -> Self:
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as by `torch.save(model)`."""
        raise StateError(
            f"{describe_rank()}: experts '{self._division.name}' cannot be pickled, as they are "
            "tied to this rank's process group: save a state_dict, and load it into a model made "
            "anew; copy.deepcopy works"
        )


def share_tokens(experts: DividedExperts, group: ProcessGroup | None) -> None:
    """Let ranks that hold the same tokens each send a share of them, from now on."""
    vars(experts)["_division"] = replace(experts._division, tokens=group)


@uncompiled
def _call(
    module: DividedExperts,
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Return the result of the module's own forward for any arguments."""
    division, for_all = module._division, module._division.for_all
    experts = sum(division.counts)
    call = read_call(own, division.name, experts, args, kwargs, for_all=for_all)
    run = runner(own, call.dims, for_all=for_all)
    return call.restore(_over_tokens(module, run, call))


def _over_tokens(module: DividedExperts, run: Run, call: RoutedCall) -> Tensor:
    """Split tokens over the ranks that hold the same ones, and gather the results."""
    group, name = module._division.tokens, module._division.name
    ranks = 1 if group is None else get_world_size(group)
    if ranks == 1:
        return _over_experts(module, run, call)
    if not module._division.checked:
        shapes = [f"{tuple(each.shape)} {each.dtype}" for each in call[:3]]
        agree(f"the tokens of '{name}', the same on all tp ranks", shapes, group)
    units = share_out(len(call.hidden) // call.unit, ranks)
    sizes = [number * call.unit for number in units]
    share = call._replace(
        hidden=functional.split(call.hidden, 0, group, sizes=sizes),
        top_k_index=call.top_k_index.split(sizes)[get_rank(group)],
        top_k_weights=functional.split(call.top_k_weights, 0, group, sizes=sizes),
    )
    return functional.gather(_over_experts(module, run, share), 0, group, sizes=sizes)


def _over_experts(module: DividedExperts, run: Run, call: RoutedCall) -> Tensor:
    """Send tokens to the ranks of their experts, compute there, and send results back."""
    division, (hidden, index, weights, *_) = module._division, call
    counts, is_local = division.counts, len(division.counts) == 1
    if is_local and not division.for_all:
        whole: Tensor = run(hidden, index, weights)
        return whole
    if is_local:
        received = Dispatched(hidden, index, weights, local_route(index))
    else:
        route = find_route(hidden, index, weights, counts, division.group)
        received = dispatch_along(route, hidden, index, weights, counts)
    named = {name: _tensor(module, name) for name in division.stacked}
    experts = partial(compute, run, received, len(division.own), [*named.values()])
    if division.checked:
        results, error = experts()
        if error is not None:
            raise error
    else:
        results = _call_first(division, received, named, experts)
    return results if is_local else combine_computed(results, received.route)


def _call_first(
    division: Division,
    received: Dispatched,
    named: Mapping[str, Tensor],
    experts: Callable[[], tuple[Tensor, Exception | None]],
) -> Tensor:
    """Return the results of the first call, and raise an error of one rank's experts on all ranks.

    Later calls make no such comparison.
    """
    try:
        results, wrong = experts()
    except _StopRecomputationError:  # ends torch's checkpoints, on all ranks at the same place
        raise
    except Exception as error:  # of any kind: the others would wait for this rank
        results, wrong = torch.zeros_like(received.hidden), error
    lines = [f"{name} {p.dtype} {tuple(p.shape[1:])}" for name, p in named.items()]
    lines.append(f"results {results.dtype}, of width {results.shape[1]}")
    agree(f"the experts '{division.name}'", lines, division.group, error=wrong)
    return results


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter, or the tensor that another strategy puts in its place in this call."""
    owner, _, own = name.rpartition(".")
    found = module.get_submodule(owner)._parameters[own]
    if found is None:
        raise StateError(f"{describe_rank()}: expert parameter '{name}' is gone")
    return found

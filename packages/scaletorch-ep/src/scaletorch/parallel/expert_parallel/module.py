"""The module that a model's experts become: the same class, with other ranks' experts behind it."""

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
from .calls import Given, Run, read_call, runner
from .computing import compute
from .exchange.dispatch import Dispatched, combine_computed, dispatch_along
from .exchange.routes import find_route, stay
from .exchange.shares import ranges_of, share_out


@dataclass(frozen=True, slots=True)
class Division:
    """How the experts of a module are divided; shared by its copies, as groups cannot be copied.

    Attributes:
        name: The module's name.
        group: Ranks that have the experts.
        tokens: Ranks that hold the same tokens and each send a share of them; None is this alone.
        counts: Experts of each rank of the group.
        stacked: Names in the module of parameters that are cut along dim 0.
        buffers: The same of buffers.
        for_all: Whether it is called with as many rows for each expert, and without a routing.
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
        """The experts of this rank."""
        return ranges_of(self.counts)[get_rank(self.group)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self


class DividedExperts(nn.Module):
    """Comes before a module's own class: its forward surrounds the module's own."""

    _division: Division

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the experts' results for tokens of this rank, [T, H], as the whole module does."""
        results: Tensor = _call(self, super().forward, args, kwargs)
        if not self._division.checked:
            self._division.checked.append(True)
        return results

    @property
    def takes_all(self) -> bool:
        """Whether it is called with as many rows for each expert."""
        return self._division.for_all

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copy(self, getattr(super(), "__deepcopy__", None), memo)

    def __copy__(self) -> Self:
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, which `torch.save(model)` does."""
        raise StateError(
            f"{describe_rank()}: experts '{self._division.name}' cannot be pickled, as they are "
            "tied to this rank's process group: save a state_dict, and load it into a model made "
            "anew; copy.deepcopy works"
        )


def share_tokens(experts: DividedExperts, group: ProcessGroup | None) -> None:
    """Have ranks that hold the same tokens each send a share of them, from now on."""
    vars(experts)["_division"] = replace(experts._division, tokens=group)


@uncompiled
def _call(
    module: DividedExperts,
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Return what the module's own forward does, whatever it is called with."""
    division, for_all = module._division, module._division.for_all
    experts = sum(division.counts)
    given = read_call(own, division.name, experts, args, kwargs, for_all=for_all)
    run = runner(own, given.dims, for_all=for_all)
    return given.back(_over_tokens(module, run, given))


def _over_tokens(module: DividedExperts, run: Run, given: Given) -> Tensor:
    """Give each rank that holds the same tokens a share of them, and join the results."""
    group, name = module._division.tokens, module._division.name
    ranks = 1 if group is None else get_world_size(group)
    if ranks == 1:
        return _over_experts(module, run, given)
    if not module._division.checked:
        shapes = [f"{tuple(each.shape)} {each.dtype}" for each in given[:3]]
        agree(f"the tokens of '{name}', the same on all tp ranks", shapes, group)
    units = share_out(len(given.hidden) // given.unit, ranks)
    sizes = [number * given.unit for number in units]
    share = given._replace(
        hidden=functional.split(given.hidden, 0, group, sizes=sizes),
        top_k_index=given.top_k_index.split(sizes)[get_rank(group)],
        top_k_weights=functional.split(given.top_k_weights, 0, group, sizes=sizes),
    )
    return functional.gather(_over_experts(module, run, share), 0, group, sizes=sizes)


def _over_experts(module: DividedExperts, run: Run, given: Given) -> Tensor:
    """Send tokens to the ranks of their experts, compute what comes, and send results back."""
    division, (hidden, index, weights, *_) = module._division, given
    counts, here = division.counts, len(division.counts) == 1
    if here and not division.for_all:
        whole: Tensor = run(hidden, index, weights)
        return whole
    if here:
        came = Dispatched(hidden, index, weights, stay(index))
    else:
        route = find_route(hidden, index, weights, counts, division.group)
        came = dispatch_along(route, hidden, index, weights, counts)
    named = {name: _tensor(module, name) for name in division.stacked}
    call = partial(compute, run, came, len(division.own), [*named.values()])
    if division.checked:
        results, wrong = call()
        if wrong is not None:
            raise wrong
    else:
        results = _call_first(division, came, named, call)
    return results if here else combine_computed(results, came.route)


def _call_first(
    division: Division,
    came: Dispatched,
    named: Mapping[str, Tensor],
    call: Callable[[], tuple[Tensor, Exception | None]],
) -> Tensor:
    """Return the results of a first call, and raise on all ranks what is wrong with one's experts.

    Later ones have no such message.
    """
    try:
        results, wrong = call()
    except _StopRecomputationError:  # torch's checkpoints end so, on all ranks at the same place
        raise
    except Exception as error:  # of whatever kind: the others would wait for this rank
        results, wrong = torch.zeros_like(came.hidden), error
    lines = [f"{name} {p.dtype} {tuple(p.shape[1:])}" for name, p in named.items()]
    lines.append(f"results {results.dtype}, of width {results.shape[1]}")
    agree(f"the experts '{division.name}'", lines, division.group, error=wrong)
    return results


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter, or what another strategy uses in its place during this call."""
    owner, _, own = name.rpartition(".")
    found = module.get_submodule(owner)._parameters[own]
    if found is None:
        raise StateError(f"{describe_rank()}: expert parameter '{name}' is gone")
    return found

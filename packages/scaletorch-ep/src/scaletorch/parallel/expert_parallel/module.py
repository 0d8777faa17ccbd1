"""The module that a model's experts become: the same class, with other ranks' experts behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import functional, get_rank, get_world_size
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import describe_rank
from ..pg_manager.building import class_before, deep_copy, shallow_copy
from .apart import why_mixed
from .computing import compute
from .dispatch import combine_computed, dispatch
from .shares import ranges_of, share_out
from .uncompiled import call_uncompiled


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
        lists: Names in the module of lists of experts.
        checked: Holds True once the ranks have agreed in a first call.
    """

    name: str
    group: ProcessGroup | None
    tokens: ProcessGroup | None
    counts: tuple[int, ...]
    stacked: tuple[str, ...]
    buffers: tuple[str, ...]
    lists: tuple[str, ...]
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
        own = super().forward
        hidden, index, weights = _routing(own, self._division.name, args, kwargs)
        results: Tensor = call_uncompiled(_over_tokens, self, own, hidden, index, weights)
        if not self._division.checked:
            self._division.checked.append(True)
        return results

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


class ExpertList(nn.ModuleList):
    """Comes before a list's class: keys are of all experts, indices count from 0 here."""

    _first_expert: int

    def _get_abs_string_index(self, idx: Any) -> str:
        local = int(super()._get_abs_string_index(idx))  # type: ignore[no-untyped-call]
        return str(local + self._first_expert)

    def __getitem__(self, idx: Any) -> Any:
        """Return this rank's expert of that index, or a plain list of some."""
        if isinstance(idx, slice):
            return nn.ModuleList(list(self._modules.values())[idx])
        return self._modules[self._get_abs_string_index(idx)]


def put_before(mixin: type[nn.Module], module: nn.Module) -> None:
    """Put `mixin` before the class of `module`, in place; it stays an instance of that class."""
    own = type(module)
    module.__class__ = class_before(mixin, own, own.__name__)


def _routing(
    own: Callable[..., Any], name: str, args: Any, kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three arguments of a call, by whatever names the module has for them."""
    given = list(args)
    if kwargs or len(given) != 3:
        given = list(inspect.signature(own).bind(*args, **kwargs).arguments.values())
    if len(given) != 3 or not all(isinstance(each, Tensor) for each in given):
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' must be called with hidden states, indices and weights "
            f"alone, got {[type(each).__name__ for each in given]}"
        )
    return given[0], given[1], given[2]


def _over_tokens(module: DividedExperts, own: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Give each rank that holds the same tokens a share of them, and join the results."""
    group = module._division.tokens
    ranks = 1 if group is None else get_world_size(group)
    if ranks == 1:
        return _over_experts(module, own, *given)
    hidden, index, weights = given
    if not module._division.checked:
        shapes = [f"{tuple(each.shape)} {each.dtype}" for each in given]
        agree(f"the tokens of '{module._division.name}', the same on all tp ranks", shapes, group)
    sizes = share_out(len(hidden), ranks)
    hidden = functional.split(hidden, 0, group, sizes=sizes)
    weights = functional.split(weights, 0, group, sizes=sizes)
    results = _over_experts(module, own, hidden, index.split(sizes)[get_rank(group)], weights)
    return functional.gather(results, 0, group, sizes=sizes)


def _over_experts(
    module: DividedExperts,
    own: Callable[..., Tensor],
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Send tokens to the ranks of their experts, compute what comes, and send results back."""
    division = module._division
    if len(division.counts) == 1:
        return own(hidden, index, weights)
    shared = vars(module).get("_beside")  # what the block computes beside them
    early = None if shared is None else partial(shared.compute_early, hidden)
    came = dispatch(hidden, index, weights, division.counts, division.group, early)
    named = {name: _tensor(module, name) for name in division.stacked}
    results, wrong = compute(own, came, len(division.own), [*named.values()])
    if not division.checked:
        here, total = len(division.own), sum(division.counts)
        names = division.stacked, division.lists
        wrong = wrong or why_mixed(module, own, came, names, here, total)
        lines = [f"{name} {p.dtype} {tuple(p.shape[1:])}" for name, p in named.items()]
        agree(f"the experts '{division.name}'", lines, division.group, error=wrong)
    if wrong is not None:
        raise wrong
    return combine_computed(results, came.route)


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter, or what another strategy uses in its place during this call."""
    owner, _, own = name.rpartition(".")
    found = module.get_submodule(owner)._parameters[own]
    if found is None:
        raise StateError(f"{describe_rank()}: expert parameter '{name}' is gone")
    return found

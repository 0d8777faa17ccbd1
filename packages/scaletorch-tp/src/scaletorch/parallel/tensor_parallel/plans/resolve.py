"""Resolve a plan for a model: find its changes and check them.

The model is not changed and nothing is sent before all checks have passed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import ModelView
from ..layers.base import TensorParallelLayer
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import HeadParameters
from ..regions.region import Region
from ..regions.surround import cannot_surround
from ..styles import Divide
from .attention import Attention, find_attentions, find_whole
from .own_plans import find_own_plan, find_torch_layers
from .plan import SEQUENCE_WHOLE, Match, Matches, Plan, children_of, match_plan, with_mixins
from .sequences import (
    check_in_attention,
    check_sequences,
    kept_whole_on_shares,
    layers_that_share,
)
from .sizes import (
    Lengths,
    check_lengths,
    check_ties,
    find_lengths,
    local_attributes,
    with_cuts,
)

_ATTENTION = (HeadParameters, ParallelMultiheadAttention)

_UNPLANNED = """\
{} has no plan of its own for its layers (_tp_plan of transformers), and a forward of a few ids \
suggests none; pass plan=suggest_plan(model, example) of scaletorch.parallel.tensor_parallel, \
which finds one by a forward of what the model takes, or write one, such as \
{{"layers.*.up": "column", "layers.*.down": "row"}}, or leave tp_size at 1 and use the other axes"""


class UnplannedError(InvalidArgumentError):
    """The caller passed no plan, and the model has no plan of its own."""


class Resolved(NamedTuple):
    """The changes that a plan makes to a model."""

    view: ModelView
    matches: Matches  # in the model's order
    attributes: Mapping[nn.Module, Mapping[str, tuple[int, ...]]]  # of each module, on each rank
    regions: list[nn.Module]  # modules whose column-parallel layers share one input
    whole: list[nn.Module]  # modules that get full sequences under sequence parallelism


def resolve(
    model: nn.Module,
    plan: Plan | None,
    tp_size: int,
    *,
    sequence_parallel: bool = False,
    divided: Collection[nn.Module] = (),
) -> Resolved:
    """Find and check the changes that a plan makes to a model, which is not changed.

    Without a plan it takes the model's own (transformers), else that of the layers of `torch.nn`,
    and leaves out modules in `divided`, which another strategy has divided over these ranks.
    """
    view = ModelView(model)
    found, heads = _match(view, plan, divided, sequence_parallel=sequence_parallel)
    matches = {match.module: match for match in with_mixins(found)}
    _check_styles(matches.values(), divided)
    named = {*heads.values()}
    attentions = find_attentions(view, matches, named)
    attributes, divided_attributes = local_attributes(matches.values(), attentions, tp_size)
    lengths = find_lengths(view, matches, attentions, heads, tp_size)
    check_lengths(Lengths([*divided_attributes, *lengths.divided], lengths.shared), tp_size)
    _check_heads(matches, attentions)
    matches = with_cuts(matches, attentions, tp_size)
    check_ties(view, matches)
    if sequence_parallel:
        check_sequences(view, list(matches.values()))
    starts = (m for m in view.names if _is_region(m, matches, ends=m not in named))
    regions = [module for module in starts if cannot_surround(module, Region) is None]
    whole: list[nn.Module] = []
    if sequence_parallel:
        earlier = [module for module in view.names if isinstance(module, Region)]
        styled = [m.module for m in matches.values() if m.style == SEQUENCE_WHOLE]
        gathers = [m.module for m in matches.values() if m.becomes(ParallelMultiheadAttention)]
        whole = [*styled, *find_whole(view, [*regions, *earlier, *styled, *gathers])]
        _check_whole(view, whole)
        check_in_attention(matches.values(), regions, whole)
        if plan is None:
            matches = kept_whole_on_shares(model, matches, [*regions, *whole])
    return Resolved(view, matches, attributes, regions, whole)


def _match(
    view: ModelView,
    plan: Plan | None,
    divided: Collection[nn.Module],
    *,
    sequence_parallel: bool,
) -> tuple[list[Match], dict[str, nn.Module]]:
    """Return the matches of the plan, and the modules known to be attention by name."""
    model = view.model
    if plan is not None:
        return match_plan(model, plan), {}
    known = find_own_plan(model, divided) or find_torch_layers(model, divided)
    if known is None:
        raise UnplannedError(_UNPLANNED.format(type(model).__name__))
    modules = dict(model.named_modules(remove_duplicate=False))
    found, heads = known
    left = [match for match in found if match.module not in divided]
    if sequence_parallel:
        left += layers_that_share(view, left)
    return left, {name: modules[name] for name in heads}


def _is_region(module: nn.Module, matches: Matches, *, ends: bool) -> bool:
    """Return whether a module starts with column-parallel and `ends` with one row-parallel layer.

    Its other children have no parameters of the hidden size, so a block with a norm of hidden
    states is not a region. Known attention may have its row-parallel layer elsewhere.
    """
    columns = rows = 0
    names = ("in_features", "out_features")
    hidden = {getattr(child, name, None) for child in module.children() for name in names}
    for child in module.children():
        found: list[type[nn.Module]] = [type(child)]  # it may be a parallel layer already
        if child in matches:
            kinds = matches[child].layer, matches[child].mixin
            found += [kind for kind in kinds if kind is not None]
        if any(issubclass(kind, ColumnParallelLinear) for kind in found):
            columns += 1
        elif any(issubclass(kind, RowParallelLinear) for kind in found):
            rows += 1
        elif any(issubclass(kind, _ATTENTION) for kind in found):
            return False  # it contains attention, so it is a block
        elif any(issubclass(kind, TensorParallelLayer) for kind in found):
            continue
        elif any(hidden.intersection(p.shape) for p in child.parameters()):
            return False
    return columns > 0 and rows in ((1,) if ends else (0, 1))


def _check_styles(matches: Iterable[Match], divided: Collection[nn.Module]) -> None:
    """Refuse a style that does not fit its module."""
    for match in matches:
        if match.layer is not None and match.module in divided:
            raise InvalidArgumentError(
                f"{match.place} is divided over these ranks already, by expert parallelism: leave "
                "it out of the plan, or give the grid etp_size = tp_size to divide it both ways"
            )
        if isinstance(match.style, Divide):
            integers = [n for n, value in vars(match.module).items() if type(value) is int]
            wrong = [name for name in match.style.attributes if name not in integers]
            if wrong:
                raise InvalidArgumentError(
                    f"{match.place} cannot divide {', '.join(wrong)}: the integer attributes that "
                    f"the module itself has are {integers}"
                )
        elif match.misfit is not None:
            raise InvalidArgumentError(f"{match.place} cannot be sharded: {match.misfit}")
        reason = None if match.mixin is None else cannot_surround(match.module, match.mixin)
        if reason is not None:
            raise InvalidArgumentError(f"{match.place} cannot be given that style: {reason}")


def _check_whole(view: ModelView, whole: Iterable[nn.Module]) -> None:
    """Refuse modules that need full sequences, but whose replaced forward cannot gather them."""
    replaced = next((module for module in whole if "forward" in vars(module)), None)
    if replaced is not None:
        raise InvalidArgumentError(
            f"with sequence parallelism '{view.names[replaced]}' ({type(replaced).__name__}) needs "
            "full sequences, but its forward was replaced on the instance: apply tensor "
            "parallelism before that, or do without sequence parallelism"
        )


def _check_heads(matches: Matches, attentions: Mapping[nn.Module, Attention]) -> None:
    """Refuse to shard per-head parameters if the head layout is unknown."""
    for match in matches.values():
        if not match.becomes(HeadParameters):
            continue
        attention = attentions.get(match.module)
        columns = [m.lengths for m in children_of(match.module, matches) if m.is_column]
        if attention is None and columns and {*columns} == {match.lengths}:
            continue  # an MLP with one element for each feature
        [count] = match.lengths
        if attention is None or count % attention.query:
            found = "none were understood" if attention is None else f"it has {attention.query}"
            raise InvalidArgumentError(
                f"{match.place} cannot be sharded: its parameters are of {count} query heads, "
                f"and of the projections next to them {found}; shard these by heads, too"
            )

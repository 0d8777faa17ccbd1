"""Sum partial gradients over tp, and take the global norm, each element counted once.

The autograd graphs of the first step show which gradients are partial sums
(`tensor_parallel.sharing`). Ranks compare their findings, since a parameter may be reached on some
ranks only. The sums take one all-reduce per dtype in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..dist import all_gather_object, all_reduce
from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.data_parallel.building import (
    Shard,
    clip_by,
    found_on_ranks,
    is_sharded,
    norm_over,
    settled_shards,
)
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import eagerly
from ..parallel.tensor_parallel import split_by_owner
from ..parallel.tensor_parallel.building import GradientSums, Reach, find_sums, whole_parameters
from .experts import expert_names
from .forward import manager_of, pipeline_of

# The share of a shard that this rank counts: all (True), nothing (False), or a mask of elements.
Counted = bool | Tensor
_counted: WeakKeyDictionary[nn.Module, tuple[object, list[Counted]]] = WeakKeyDictionary()


def global_grad_norm(
    model: nn.Module, manager: ProcessGroupManager | None = None, *, norm_type: float = 2.0
) -> Tensor:
    """Return the gradient norm of the whole plain model, each element counted once.

    It costs an all-reduce of one number over tp and pp, and over cp x dp if the optimizer or
    gradients are sharded there; over all ranks if experts are divided.

    Args:
        model: The model that `parallelize` returned, with gradients already summed over cp x dp, as
            after `train_step`. A gradient that is None counts as zero.
        manager: The grid; by default the model's.
        norm_type: Order of the norm, above 0; `float("inf")` is the largest element.

    Returns:
        0-d, in the parameters' dtype and float32 at least, the same bits on every rank.

    Raises:
        InvalidArgumentError: `norm_type` is not a number above 0.
    """
    manager = manager_of(model, manager)
    groups = [manager.cp_dp_group] if is_sharded(model) else []
    groups += [manager.tp_group, manager.pp_group]
    if not manager.grid.is_plain:  # experts may differ between ranks along any axis
        groups = [manager.world_group]
    return norm_over(counted_gradients(model, manager), groups, model, norm_type)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    manager: ProcessGroupManager | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale a parallelized model's gradients in place so that their norm is at most `max_norm`.

    Args:
        model: As in `global_grad_norm`.
        max_norm: At least 0.
        manager: The grid; by default the model's.
        norm_type: As in `global_grad_norm`.
        error_if_nonfinite: Raise if the norm is not finite. If False, a norm that is not finite
            makes gradients NaN or 0, as in torch's function of this name.

    Returns:
        The norm before clipping, as in `global_grad_norm`.

    Raises:
        InvalidArgumentError: `max_norm` or `norm_type` is out of range.
        NonFiniteError: The norm is not finite and `error_if_nonfinite` is set; on every rank, with
            the parameters and their ranks.
    """
    manager = manager_of(model, manager)
    return clip_by(
        lambda: global_grad_norm(model, manager, norm_type=norm_type),
        lambda: nonfinite_gradients(model, manager),
        model,
        max_norm,
        error_if_nonfinite=error_if_nonfinite,
    )


def nonfinite_gradients(
    model: nn.Module, manager: ProcessGroupManager | None = None
) -> list[tuple[str, str]]:
    """Return the gradients that are infinite or NaN, with their ranks; all ranks call it.

    `model` and `manager` are as in `global_grad_norm`.

    Returns:
        A parameter's name and a rank's coordinates, `("norm.weight", "dp0 pp1 cp0 tp1")`, for
        every rank with a non-finite element; sorted by rank, the same list on all ranks.
    """
    manager = manager_of(model, manager)
    place = str(manager.grid.coordinates(manager.global_rank))
    return found_on_ranks(model, manager.world_group, place)


def counted_gradients(model: nn.Module, manager: ProcessGroupManager) -> Iterator[Tensor]:
    """Yield the gradients that this rank adds to the norm; replicas count on their first rank."""
    shards = settled_shards(model)
    alike = not is_sharded(model) and manager.grid.is_plain
    first, first_of_expert = manager.cp_dp_rank == 0 or alike, manager.edp_rank == 0
    experts = expert_names(model)
    for shard, counted in zip(shards, _shares_counted(model, shards, manager), strict=True):
        gradient = shard.tensor.grad
        is_first = first_of_expert if shard.name in experts else first
        if gradient is None or counted is False or (shard.replicated and not is_first):
            continue
        if isinstance(counted, Tensor):
            gradient = gradient.flatten().where(counted, gradient.new_zeros(()))
        yield gradient


def _shares_counted(
    model: nn.Module, shards: Sequence[Shard], manager: ProcessGroupManager
) -> list[Counted]:
    """Return the share of each shard that this rank counts, cached until the shards change."""
    ranges = [(s.name, s.parameter.shape, s.parameter.device, s.start, s.stop) for s in shards]
    key = (ranges, manager.tp_rank, manager.pp_rank)
    known = _counted.get(model)
    if known is None or known[0] != key:
        tied: dict[str, tuple[int, ...]] = getattr(model, "tied_parameters", {})  # of a stage
        on_stage = [tied.get(s.name, (manager.pp_rank,))[0] == manager.pp_rank for s in shards]
        # If each expert is cut over tp (etp = tp), experts count by tp rank like other parameters.
        whole = expert_names(model) if manager.etp_size == 1 else frozenset[str]()
        owned: dict[str, Counted] = dict.fromkeys(whole, True)
        rest = [s for s, own in zip(shards, on_stage, strict=True) if own and s.name not in owned]
        owned |= _owned(model, rest, manager)
        counted = [own and owned[s.name] for s, own in zip(shards, on_stage, strict=True)]
        cut = [
            each if isinstance(each, bool) else each.flatten()[s.start : s.stop]
            for each, s in zip(counted, shards, strict=True)
        ]
        known = _counted[model] = key, cut
    return known[1]


def _owned(
    model: nn.Module, shards: Sequence[Shard], manager: ProcessGroupManager
) -> dict[str, Counted]:
    """Return the elements of each parameter on this rank that no earlier tp rank has."""
    values = {shard.name: shard.parameter.detach() for shard in shards}
    owned: dict[str, Counted] = {}
    mixed: dict[str, Tensor] = {}
    for name, pieces in split_by_owner(model, values).items():
        own = {owner == manager.tp_rank for owner, _ in pieces}
        if len(own) == 1:
            owned[name] = own.pop()
        else:
            mixed[name] = torch.zeros_like(values[name], dtype=torch.bool)
    for name, pieces in split_by_owner(model, mixed).items():
        for owner, piece in pieces:
            piece.fill_(owner == manager.tp_rank)  # a view of the mask
        owned[name] = mixed[name]
    return owned


@dataclass(slots=True)
class _Partial:
    """The partial gradients of one model."""

    sums: GradientSums
    whole: Mapping[str, nn.Parameter]  # trainable, and whole on every tp rank
    names: list[str] = field(default_factory=list)  # parameters whose gradients are summed
    unknown: list[str] = field(default_factory=list)  # parameters that no rank has reached yet
    compared: bool = False  # the ranks have compared their findings
    shards: list[Shard] | None = None  # the shards that this rank's optimizers updated then
    same: bool = True  # ranks that differ in tp alone have equal ranges of these shards
    pending: bool = False  # the last step was in `no_sync`, so its gradients are not summed


_known: WeakKeyDictionary[nn.Module, _Partial | None] = WeakKeyDictionary()


@contextmanager
def sum_partial_gradients(
    model: DataParallelBucket, manager: ProcessGroupManager
) -> Iterator[None]:
    """Sum partial gradients over tp at the end of the step that runs in this context."""
    if model not in _known:
        sums = find_sums(model) if manager.tp_size > 1 else None
        _known[model] = None if sums is None else _Partial(sums, whole_parameters(model))
    state = _known[model]
    if state is None:
        yield
        return
    first, earlier = not state.compared, False
    if first:
        state.sums.look_again()
        earlier = any(each.grad is not None for each in state.whole.values())
    elif not state.pending:  # gradients of earlier steps will be summed once more
        named = [name for name in state.names if state.whole[name].grad is not None]
        found = (shard.tensor.grad for shard in _shards_of(state, model, named))
        gradients = {id(each): each for each in found if each is not None}
        if gradients:
            torch._foreach_div_([*gradients.values()], manager.tp_size)
    with state.sums.summed_later(), eagerly() if first else nullcontext():
        yield
    if first or model.optimizer_shards is not state.shards:
        _compare(state, model, manager, earlier)
    elif state.unknown:
        _compare_late(state, manager)
    state.pending = not model.require_backward_grad_sync
    if not state.pending:
        _sum(state, model, manager)


def _shards_of(state: _Partial, model: DataParallelBucket, names: Iterable[str]) -> list[Shard]:
    """Return the shards of some parameters that this rank updates, in the order of `names`."""
    whole = state.whole
    if model.optimizer_shards is None:
        return [Shard(n, whole[n], 0, whole[n].numel(), whole[n], replicated=True) for n in names]
    order = {name: index for index, name in enumerate(names)}
    found = [each for each in model.optimizer_shards if each.name in order]
    return sorted(found, key=lambda shard: (order[shard.name], shard.start))


def _compare(
    state: _Partial, model: DataParallelBucket, manager: ProcessGroupManager, earlier: bool
) -> None:
    """Exchange how ranks reach each parameter; refuse both ways, and `earlier` gradients."""
    reached = {name: state.sums.reach(each).value for name, each in state.whole.items()}
    ties = [tie.names for tie in pipeline_of(model).ties]
    place = manager.pp_rank, manager.cp_dp_rank
    ranges = [(each.name, each.start, each.stop) for each in _shards_of(state, model, state.whole)]
    told = all_gather_object((reached, ties, place, ranges, earlier), manager.world_group)
    if any(earlier for *_, earlier in told):
        raise InvalidArgumentError(
            f"{describe_rank()}: the first train_step began with gradients, which may be sums over "
            "the tensor-parallel ranks or terms of them: call zero_grad() before it"
        )
    found: dict[str, Reach] = {}
    for theirs, *_ in told:
        for name, value in theirs.items():
            found[name] = found.get(name, Reach.NOT) | Reach(value)
    for names in {names for _, their, *_ in told for names in their}:
        together = Reach.NOT
        for name in names:
            together |= found.get(name, Reach.NOT)
        found |= dict.fromkeys(found.keys() & {*names}, together)
    _refuse_both([name for name, reach in found.items() if reach is Reach.BOTH])
    for name, each in state.whole.items():
        state.sums.note(each, found[name])
    _sort(state)
    for name in _hidden(state):
        state.sums.refuse_hidden(name)
        state.sums.note(state.whole[name], Reach.WHOLE)
    _sort(state)
    # One span for each place in dp, cp and pp if its tp ranks have equal ranges.
    spans = {(at, tuple(their)) for _, _, at, their, _ in told}
    state.compared, state.shards = True, model.optimizer_shards
    state.same = len(spans) == len({at for at, _ in spans})


def _refuse_both(names: Sequence[str]) -> None:
    """Refuse parameters whose gradients are whole on some ranks, and partial on others."""
    if names:
        raise InvalidArgumentError(
            f"{describe_rank()}: {', '.join(names[:4])}: the gradient is whole on some stages or "
            "ranks, and a term of a sum over the tensor-parallel ranks on others. Use one "
            "parameter inside of parallel regions, or on shares of sequences, and another outside"
        )


def _hidden(state: _Partial) -> list[str]:
    """Return the parameters with a gradient whose origin no rank saw in its graph."""
    return [name for name in state.unknown if state.whole[name].grad is not None]


def _compare_late(state: _Partial, manager: ProcessGroupManager) -> None:
    """Compare how ranks reach parameters not reached before; all ranks of a stage call it."""
    late = _hidden(state)
    if not late:
        return
    reached = [state.sums.reach(state.whole[name]) for name in late]
    codes = [[Reach.WHOLE in each, Reach.PARTIAL in each] for each in reached]
    found = torch.tensor(codes, dtype=torch.int32, device=state.whole[late[0]].device)
    for group in (manager.cp_dp_group, manager.tp_group):
        all_reduce(found, "max", group=group)
    kinds = dict(zip(late, found.tolist(), strict=True))
    _refuse_both([name for name, each in kinds.items() if all(each)])
    for name, (whole, partial) in kinds.items():
        if not partial and not whole:
            state.sums.refuse_hidden(name)
        state.sums.note(state.whole[name], Reach.PARTIAL if partial else Reach.WHOLE)
    _sort(state)


def _sort(state: _Partial) -> None:
    reach = {name: state.sums.reach(each) for name, each in state.whole.items()}
    state.names = [name for name, each in reach.items() if each is Reach.PARTIAL]
    state.unknown = [name for name, each in reach.items() if each is Reach.NOT]


def _sum(state: _Partial, model: DataParallelBucket, manager: ProcessGroupManager) -> None:
    """Sum the gradients, with one all-reduce for each dtype, float32 at least."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in state.names:
        wide = torch.promote_types(state.whole[name].dtype, torch.float32)
        by_dtype.setdefault(wide, []).append(name)
    for dtype, names in by_dtype.items():
        _sum_shards(names, _shards_of(state, model, names), dtype, state, manager)


@torch.no_grad()
def _sum_shards(
    names: Sequence[str],
    shards: Sequence[Shard],
    dtype: torch.dtype,
    state: _Partial,
    manager: ProcessGroupManager,
) -> None:
    """Sum whole gradients, zero outside of this rank's shards, and copy the sums to its shards."""
    sizes = [state.whole[name].numel() for name in names]
    flat = torch.zeros(sum(sizes) + len(names), dtype=dtype, device=state.whole[names[0]].device)
    *views, used = flat.split([*sizes, len(names)])
    places = {name: (at, view) for at, (name, view) in enumerate(zip(names, views, strict=True))}
    # Summed over cp x dp as well unless `same`: then replicated gradients count on one rank only.
    counted = state.same or manager.cp_dp_rank == 0
    sent: list[tuple[Tensor, Tensor]] = []
    for shard in shards:
        if shard.tensor.grad is not None and (counted or not shard.replicated):
            at, view = places[shard.name]
            sent.append((view[shard.start : shard.stop], shard.tensor.grad.flatten()))
            sent.append((used[at], flat.new_ones(())))
    if sent:
        torch._foreach_copy_([to for to, _ in sent], [value for _, value in sent])
    for group in (manager.tp_group,) if state.same else (manager.cp_dp_group, manager.tp_group):
        all_reduce(flat, group=group)
    for shard in shards:
        at, view = places[shard.name]
        total = view[shard.start : shard.stop].view_as(shard.tensor)
        if shard.tensor.grad is not None:
            shard.tensor.grad.copy_(total)
        elif used[at] > 0:  # another rank has one; reading this waits for the device
            shard.tensor.grad = total.to(shard.tensor.dtype, copy=True)

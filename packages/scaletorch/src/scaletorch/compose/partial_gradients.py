"""Sum partial gradients over tensor-parallel ranks, once per step, in one all-reduce per dtype.

The autograd graphs of the first step show which gradients are partial sums
(`tensor_parallel.sharing`). Ranks compare their findings, since a parameter may be reached on some
ranks only.
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
from ..parallel.data_parallel.building import Shard
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import eagerly
from ..parallel.tensor_parallel.building import GradientSums, Reach, find_sums, whole_parameters
from .forward import pipeline_of

_APART = (
    "Use one parameter inside of parallel regions, or on shares of sequences, and another outside"
)


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
    elif not state.pending:
        _share_earlier(state, model, manager)
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


def _share_earlier(
    state: _Partial, model: DataParallelBucket, manager: ProcessGroupManager
) -> None:
    """Divide gradients of earlier steps by tp_size, since they will be summed once more."""
    held = (name for name in state.names if state.whole[name].grad is not None)
    found = (shard.tensor.grad for shard in _shards_of(state, model, held))
    gradients = {id(each): each for each in found if each is not None}
    if gradients:
        torch._foreach_div_([*gradients.values()], manager.tp_size)


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
    both = [name for name, reach in found.items() if reach is Reach.BOTH]
    if both:
        raise InvalidArgumentError(
            f"{describe_rank()}: {', '.join(both[:4])}: the gradient is whole on some stages or "
            f"ranks, and a term of a sum over the tensor-parallel ranks on others. {_APART}"
        )
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
    for name, (whole, partial) in zip(late, found.tolist(), strict=True):
        if whole and partial:
            raise InvalidArgumentError(
                f"{describe_rank()}: {name} was used both inside of parallel regions and outside. "
                f"{_APART}"
            )
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

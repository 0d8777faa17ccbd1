"""The tensors of a model on this rank, as rectangles of the plain model's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn

from ...compose.whole_matrices import whole_shards
from ...dist.errors import InvalidArgumentError
from ...parallel.data_parallel import Shard, parameter_shards
from ...parallel.expert_parallel.building import ExpertCut, find_expert_cuts
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.tensor_parallel.building import ParameterCut, find_cuts

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a whole tensor that is on this rank.

    Attributes:
        offsets: Where it begins in the whole.
        tensor: The memory that it has here, a view of the rectangle's shape.
        owner: The first tensor-parallel rank that has it.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    owner: int


def rectangles(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield rectangles that are, one after another, a range of a row-major tensor's elements.

    A partial first row, whole rows, and a partial last one; partial rows so in turn.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _within(last, start, stop, shape)
        return
    yield from _within(first - 1, start, first * row, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, last * row, stop, shape)


def _within(index: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    before = index * prod(shape[1:])
    for offsets, sizes in rectangles(start - before, stop - before, shape[1:]):
        yield (index, *offsets), (1, *sizes)


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer on this rank.

    Attributes:
        names: All its names in the whole model, in the model's order; it is saved by the first.
        tensor: What is here of it.
        shape: The whole's.
        cut: How it is cut over tp; None if it is not.
        experts: How it is divided over ep, along dim 0; None if it is no experts'. These may be
            cut over tp as well.
        owner: The first tensor-parallel rank that has it, if it is not cut over tp.
        first: Whether this is the first stage of the pipeline that has it.
    """

    names: tuple[str, ...]
    tensor: Tensor
    shape: tuple[int, ...]
    cut: ParameterCut | None
    experts: ExpertCut | None
    owner: int
    first: bool

    @property
    def name(self) -> str:
        """The name that it is saved by."""
        return self.names[0]

    @property
    def dim(self) -> int | None:
        """The dim that is cut over tp."""
        return None if self.cut is None else self.cut.dim

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return torch.Size(self.shape).numel() * self.tensor.dtype.itemsize

    def parts(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> Iterator[Part]:
        """Yield the parts of the whole in `tensor`, which is elements start to stop of this.

        It is flat, or has the shape of what is here.
        """
        found, shape = tensor.detach(), tuple(self.tensor.shape)
        if tuple(found.shape) == shape:  # also where it is not contiguous
            boxes = [((0,) * len(shape), found)] if found.numel() else []
        else:
            places = list(rectangles(start, self.tensor.numel() if stop is None else stop, shape))
            flat = found.split([prod(sizes) for _, sizes in places])
            boxes = [(at, t.view(sizes)) for (at, sizes), t in zip(places, flat, strict=True)]
        for at, box in boxes:
            for part in self._cut(at, box):
                if self.experts is None:
                    yield part
                else:
                    first, *rest = part.offsets
                    yield replace(part, offsets=(first + self.experts.own.start, *rest))

    def _cut(self, offsets: tuple[int, ...], box: Tensor) -> Iterator[Part]:
        """Yield what lies in one place of the whole, of a rectangle of what is here."""
        if self.cut is None:
            yield Part(offsets, box, self.owner)
            return
        dim, cut, rank, local = self.cut.dim, self.cut.cut, self.cut.layer.tp_rank, 0
        begin, end = offsets[dim], offsets[dim] + box.shape[dim]
        for own, owner in zip(cut.ranges[rank], cut.owners(rank), strict=True):
            low, high = max(begin, local), min(end, local + len(own))
            if low < high:
                at = (*offsets[:dim], own.start + low - local, *offsets[dim + 1 :])
                yield Part(at, box.narrow(dim, low - begin, high - low), owner)
            local += len(own)


def find_held(model: nn.Module, manager: ProcessGroupManager) -> dict[int, Held]:
    """Return id of a tensor -> what it is, for all of the model's state on this rank.

    Raises:
        InvalidArgumentError: The state has something that is no parameter and no buffer, and that
            loading would not bring back.
    """
    cuts, experts = find_cuts(model), find_expert_cuts(model)
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    named: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in own:
            raise InvalidArgumentError(
                f"the model's state '{name}', a {type(value).__name__}, is no parameter and no "
                "buffer (an extra state, or a copy that a hook of state_dict makes); a checkpoint "
                "holds these alone: keep it in a buffer, or pass it as extra"
            )
        named.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    stages = {name: tie for tie in getattr(model, "ties", ()) for name in tie.names}
    held = {}
    for key, names in named.items():
        tie = stages.get(names[0])
        every = tuple(names) if tie is None else tie.names
        first = tie is None or tie.owners[0] == manager.pp_rank
        how = cuts.get(names[0]), experts.get(names[0])
        held[key] = describe(tensors[key], every, *how, manager, first=first)
    return held


def describe(
    tensor: Tensor,
    names: tuple[str, ...],
    cut: ParameterCut | None,
    experts: ExpertCut | None,
    manager: ProcessGroupManager,
    *,
    first: bool = True,
) -> Held:
    """Return what a tensor is that is cut so over tp, and of so many experts over ep.

    Where each of them is cut over tp (etp = tp), the tp ranks have the same ones; otherwise no
    other tp rank has this one's.
    """
    shape, owner = tuple(tensor.shape), 0
    if cut is not None and cut.layer.tp_size == 1:
        cut = None
    if cut is not None:
        shape = cut.whole(shape)
    if experts is not None:
        shape = (experts.whole, *shape[1:])
        owner = 0 if manager.grid.etp > 1 else manager.tp_rank
    return Held(names, tensor, shape, cut, experts, owner, first)


@torch.no_grad()
def refresh_shards(shards: Sequence[tuple[Shard, Held]]) -> None:
    """Give shards that are copies of parameters, and no masters, the parameters' new values."""
    for shard, held in shards:
        begin = shard.parameter.data_ptr() + shard.start * shard.parameter.itemsize
        apart = shard.tensor.data_ptr() != begin and not is_whole_matrix(shard, held)
        if apart and not shard.is_master:
            own = shard.parameter.flatten()[shard.start : shard.stop]
            shard.tensor.copy_(own.view_as(shard.tensor))


def find_ties(held: dict[int, Held]) -> dict[str, list[str]]:
    """Return the name that a tied tensor is saved by -> all its names."""
    return {each.name: list(each.names) for each in held.values() if len(each.names) > 1}


def find_shards(
    model: nn.Module,
    held: Mapping[int, Held],
    optimizer: torch.optim.Optimizer | None,
    manager: ProcessGroupManager,
) -> list[tuple[Shard, Held]]:
    """Return what an optimizer may have for the model, and what it is a range of.

    Parameters that were frozen since are among them. Behind them are the whole matrices that the
    optimizer has in the place of tp shards, each as if it was not cut.

    Args:
        model: Any module.
        held: Its state, by id.
        optimizer: Of the model's parameters, or of their shards.
        manager: The grid.

    Raises:
        InvalidArgumentError: One of these belongs to no parameter of the model, or to one that is
            not in its state.
    """
    shards, wholes = parameter_shards(model), whole_shards(optimizer)
    listed = {id(shard.tensor) for shard in shards} | {id(whole) for _, whole in wholes}
    groups = [] if optimizer is None else optimizer.param_groups
    updated = [tensor for group in groups for tensor in group["params"]]
    rest = {id(tensor): tensor for tensor in updated if id(tensor) not in listed}
    for name, each in model.named_parameters():
        if rest.pop(id(each), None) is not None:
            shards.append(Shard(name, each, 0, each.numel(), each, replicated=True))
    if rest:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in list(rest.values())[:4])
        raise InvalidArgumentError(
            f"the optimizer updates {len(rest)} tensors (of shape {shapes}) that are no parameters "
            "of this model: make it of the parallelized model's parameters"
        )
    for shard in shards:
        if id(shard.parameter) not in held:
            raise InvalidArgumentError(
                f"the model's state_dict leaves out the parameter '{shard.name}', which is trained:"
                " freeze it, or let state_dict have it"
            )
    found = [(shard, held[id(shard.parameter)]) for shard in shards]
    for shard, whole in wholes:
        plain = replace(held[id(shard.parameter)], tensor=whole, cut=None, owner=manager.tp_rank)
        found.append((replace(shard, start=0, stop=whole.numel(), tensor=whole), plain))
    return found


def is_whole_matrix(shard: Shard, held: Held) -> bool:
    """Return whether an optimizer has a whole matrix in the place of a shard."""
    return held.tensor is not shard.parameter

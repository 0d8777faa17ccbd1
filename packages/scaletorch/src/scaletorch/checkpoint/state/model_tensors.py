"""A model's tensors on this rank, as rectangles of the plain model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
class Rectangle:
    """A rectangle of a whole tensor, held by this rank."""

    offsets: tuple[int, ...]  # its first index in the whole tensor, per dim
    tensor: Tensor  # its memory on this rank, a view of the rectangle's shape
    owner: int  # the first tp rank that has it


def split_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Split a range of a row-major tensor's elements into whole and partial rows, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    yield from _within(first - 1, start, min(first * row, stop), shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, max(first, last) * row, stop, shape)


def _within(index: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    before = index * prod(shape[1:])  # elements of earlier rows
    for offsets, sizes in split_range(start - before, stop - before, shape[1:]):
        yield (index, *offsets), (1, *sizes)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer on this rank."""

    names: tuple[str, ...]  # all its names in the model, in order; the first is saved
    tensor: Tensor  # this rank's shard of it
    shape: tuple[int, ...]  # shape of the whole tensor
    cut: ParameterCut | None  # its sharding over tp; None if it is not sharded
    experts: ExpertCut | None  # its sharding over ep, along dim 0; None if it is no expert weight
    owner: int  # the first tp rank that has it, if it is not sharded over tp
    first: bool  # whether this is the first pipeline stage that has it

    @property
    def name(self) -> str:
        """The name that it is saved under."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.tensor.dtype.itemsize

    @property
    def replicas(self) -> str:
        """The axis of the ranks that hold the same values."""
        return "cp_dp" if self.experts is None else "edp"

    def rectangles(
        self, tensor: Tensor, start: int = 0, stop: int | None = None
    ) -> Iterator[Rectangle]:
        """Yield the rectangles in `tensor`: this rank's shard, or its flat range start to stop."""
        found, shape = tensor.detach(), tuple(self.tensor.shape)
        if tuple(found.shape) == shape:  # may be non-contiguous
            boxes = [((0,) * len(shape), found)] if found.numel() else []
        else:
            places = list(split_range(start, self.tensor.numel() if stop is None else stop, shape))
            flat = found.split([prod(sizes) for _, sizes in places])
            boxes = [(start, t.view(sizes)) for (start, sizes), t in zip(places, flat, strict=True)]
        for offsets, box in boxes:
            if self.experts is not None:
                offsets = (offsets[0] + self.experts.own.start, *offsets[1:])
            yield from self._cut(offsets, box)

    def _cut(self, offsets: tuple[int, ...], box: Tensor) -> Iterator[Rectangle]:
        """Split a rectangle of this shard where its slices are not adjacent in the whole tensor."""
        if self.cut is None:
            yield Rectangle(offsets, box, self.owner)
            return
        dim, cut, rank, local = self.cut.dim, self.cut.cut, self.cut.layer.tp_rank, 0
        begin, end = offsets[dim], offsets[dim] + box.shape[dim]
        for own, owner in zip(cut.ranges[rank], cut.owners(rank), strict=True):
            low, high = max(begin, local), min(end, local + len(own))
            if low < high:
                begins = (*offsets[:dim], own.start + low - local, *offsets[dim + 1 :])
                yield Rectangle(begins, box.narrow(dim, low - begin, high - low), owner)
            local += len(own)


def device_of(held: Iterable[ModelTensor]) -> torch.device:
    """Return the device of a model's tensors; the CPU if there are none."""
    return next((each.tensor.device for each in held), torch.device("cpu"))


def find_tensors(model: nn.Module, manager: ProcessGroupManager) -> dict[int, ModelTensor]:
    """Map each tensor's id to its `ModelTensor`, for all of the model's state on this rank."""
    cuts, experts = find_cuts(model), find_expert_cuts(model)
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    named: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in own:
            raise InvalidArgumentError(
                f"state_dict has '{name}', a {type(value).__name__}, which is no parameter or "
                "buffer of the model (an extra state, or a copy that a hook made), and a "
                "checkpoint stores only these: keep it in a buffer, or pass it as extra"
            )
        named.setdefault(id(value), (value, []))[1].append(name)
    stages = {name: tie for tie in getattr(model, "ties", ()) for name in tie.names}
    held = {}
    for key, (tensor, names) in named.items():
        tie = stages.get(names[0])
        every = tuple(names) if tie is None else tie.names
        first = tie is None or tie.owners[0] == manager.pp_rank
        cut, expert_cut = cuts.get(names[0]), experts.get(names[0])
        shape, owner = tuple(tensor.shape), 0
        if cut is not None and cut.layer.tp_size == 1:
            cut = None
        if cut is not None:
            shape = cut.whole(shape)
        if expert_cut is not None:
            shape = (expert_cut.whole, *shape[1:])
            owner = 0 if manager.grid.etp > 1 else manager.tp_rank  # 0: all tp ranks have them
        held[key] = ModelTensor(every, tensor, shape, cut, expert_cut, owner, first)
    return held


def find_ties(held: Iterable[ModelTensor]) -> dict[str, list[str]]:
    """Map the name under which each tied tensor is saved to all its names."""
    return {each.name: list(each.names) for each in held if len(each.names) > 1}


def find_shards(
    model: nn.Module,
    held: Mapping[int, ModelTensor],
    optimizer: torch.optim.Optimizer | None,
    manager: ProcessGroupManager,
) -> list[tuple[Shard, ModelTensor]]:
    """Return the tensors that an optimizer may update, each with the tensor that contains it.

    Includes parameters frozen since. Last come the whole matrices that the optimizer has in place
    of tp shards, each with a `ModelTensor` that is not sharded over tp.
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
            "of this model: create it with the parameters of the parallelized model"
        )
    for shard in shards:
        if id(shard.parameter) not in held:
            raise InvalidArgumentError(
                f"the model's state_dict leaves out the parameter '{shard.name}', which is trained:"
                " freeze it, or keep it in state_dict"
            )
    found = [(shard, held[id(shard.parameter)]) for shard in shards]
    for shard, whole in wholes:
        plain = replace(held[id(shard.parameter)], tensor=whole, cut=None, owner=manager.tp_rank)
        found.append((replace(shard, start=0, stop=whole.numel(), tensor=whole), plain))
    return found


def is_whole_matrix(shard: Shard, held: ModelTensor) -> bool:
    """Return whether the optimizer has a whole matrix in place of this shard."""
    return held.tensor is not shard.parameter

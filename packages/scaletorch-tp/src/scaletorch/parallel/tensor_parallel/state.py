"""Full tensors from shards and back, and the state for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import get_world_size
from ...dist.building import agree
from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from ..placement import Cut, Invariant, Shard, convert
from .layers.base import TensorParallelLayer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class ParameterCut(NamedTuple):
    """The layer of a parameter, its shard dim, and the cut of that dim."""

    layer: TensorParallelLayer
    dim: int
    cut: Cut

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the full shape, given that of a shard."""
        return (*shape[: self.dim], self.cut.whole, *shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor: a view if it is one range, else a copy."""
        return self.cut.take(whole, self.dim, self.layer.tp_rank)

    def join(self, shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """Return the full tensor on every rank; all ranks call this."""
        group = self.layer.group if group is None else group
        joined = convert(shard, Shard(self.dim, self.cut.sizes), Invariant(), group)
        return self.cut.arrange(joined, self.dim)


# The first rank that holds a piece of a shard, and the piece.
Owned = tuple[int, Tensor]


def shard_dims(model: nn.Module) -> dict[str, int | None]:
    """Return parameter name -> its shard dim, or None if it is replicated.

    Every name of a tied parameter is listed.
    """
    cuts = find_cuts(model)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: cuts[name].dim if name in cuts else None for name in names}


def take_own(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, as a view if possible.

    Args:
        model: A model with tensor-parallel layers.
        name: Name of a parameter or buffer. If it is replicated, or on another pipeline stage,
            `whole` is returned as it is.
        whole: The plain model's tensor of that name, or its gradient or optimizer state.

    Raises:
        InvalidArgumentError: `whole` has another length than the plain parameter, or the module
            that the name leads to has no such entry.
    """
    layer, (parameter, *rest) = model, name.split(".")
    while rest and isinstance(child := getattr(layer, parameter, None), nn.Module):
        layer, (parameter, *rest) = child, rest
    _refuse_misspelt(model, name, layer, parameter)
    if not isinstance(layer, TensorParallelLayer) or layer.tp_size == 1 or rest:
        return whole  # not sharded, or of another pipeline stage
    dim = layer.shard_dims.get(parameter)
    if dim is None:
        return whole
    cut = ParameterCut(layer, dim, layer.cut_of(parameter))
    if whole.dim() <= dim or whole.shape[dim] != cut.cut.whole:
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' has shape {tuple(whole.shape)}, but the whole has "
            f"{cut.cut.whole} along dim {dim}"
        )
    return cut.take(whole)


def _refuse_misspelt(model: nn.Module, name: str, module: nn.Module, component: str) -> None:
    """Refuse a name whose next component is missing in a module that has entries."""
    known = {**module._modules, **module._parameters, **module._buffers}
    missing = component not in known and not hasattr(module, component)
    if known and missing and component != "_extra_state":
        raise InvalidArgumentError(
            f"{describe_rank()}: the model has no '{name}', but a module with {', '.join(known)}"
        )


def split_by_owner(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Owned, ...]]:
    """Split this rank's tensors into pieces, each with its owner: the first tp rank that holds it.

    The owner is 0 for replicated tensors, and this rank for a piece that no other rank holds. A
    shard is one piece, or one piece per packed projection of a fused weight; pieces may be
    replicated. If each piece is counted only on its owner, each element is counted once.

    Args:
        model: A model with tensor-parallel layers.
        tensors: Name of a parameter (or buffer) -> this rank's shard, or its gradient or similar.

    Returns:
        Name -> (owner, piece) pairs, in order; pieces are views of the tensors.

    Raises:
        InvalidArgumentError: A name is not the model's, or a tensor has not its shard's shape.
    """
    _check_shards(model, tensors)
    cuts = find_cuts(model)
    found: dict[str, tuple[Owned, ...]] = {name: ((0, x),) for name, x in tensors.items()}
    # In one order on all ranks: splits of FSDP2's tensors communicate.
    for name in (n for n in tensors if n in cuts and cuts[n].layer.tp_size > 1):
        layer, dim, cut = cuts[name]
        pieces = tensors[name].split([*map(len, cut.ranges[layer.tp_rank])], dim)
        found[name] = tuple(zip(cut.owners(layer.tp_rank), pieces, strict=True))
    return found


def gather_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Return full tensors from every rank's shards; all ranks of the tp axis call this.

    Args:
        model: A model with tensor-parallel layers.
        tensors: Name of a parameter (or buffer) -> a tensor that is sharded like it, such as its
            value, its gradient or its optimizer state.
        group: Ranks of the tensor-parallel axis; None means each layer's own group.

    Returns:
        Name -> full tensor on every rank, which shares no memory with the given one.

    Raises:
        InvalidArgumentError: A name is not the model's, or a tensor has not its shard's shape.
        MismatchError: The ranks passed different names.
    """
    cuts = find_cuts(model)
    _check_shards(model, tensors)
    _check_group(cuts, group)
    for layer in [cut.layer for cut in cuts.values()][:1]:
        # Ranks that gather different tensors would deadlock.
        lines = [f"{n} {cuts[n].whole(t.shape)} {t.dtype}" for n, t in tensors.items() if n in cuts]
        agree("the tensors to gather", sorted(lines), layer.group if group is None else group)
    # Gather a tied parameter once: the same tensor under two names stays one.
    whole: dict[int, Tensor] = {}
    for name in sorted(tensors):  # in one order on all ranks
        key, own, cut = id(tensors[name]), tensors[name].detach(), cuts.get(name)
        if key not in whole:
            copied = cut is None or cut.layer.tp_size == 1
            whole[key] = own.clone() if copied else cuts[name].join(own, group)
    return {name: whole[id(tensor)] for name, tensor in tensors.items()}


def gather_state_dict(model: nn.Module, group: ProcessGroup | None = None) -> dict[str, Any]:
    """Return a copy of the plain, one-process model's state dict on every rank.

    All ranks of the tp axis call this; `group` is as in `gather_tensors`.
    """
    state = dict(model.state_dict(keep_vars=True))
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return state | gather_tensors(model, tensors, group)


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    strict: bool = True,
) -> None:
    """Load this rank's shards from the plain model's state dict, without communication.

    Args:
        model: A model with tensor-parallel layers.
        state: The plain model's `state_dict()`. One name of a tied parameter is enough.
        group: Ranks of the tensor-parallel axis; None means each layer's own group.
        strict: Refuse missing and unknown names.

    Raises:
        InvalidArgumentError: Names or shapes are not the plain model's; nothing was loaded.
    """
    cuts = find_cuts(model)
    current = model.state_dict(keep_vars=True)
    if strict:
        given = {id(current[name]) for name in state if name in current}
        _check_names("the model has no", set(state) - set(current))
        _check_names("the state lacks", {n for n, v in current.items() if id(v) not in given})
    _check_group(cuts, group)
    local = dict(state)
    for name in (n for n in current if isinstance(state.get(n), Tensor)):
        cut, shape = cuts.get(name), tuple(current[name].shape)
        _check_shape(name, state[name], shape if cut is None else cut.whole(shape), "the whole")
        if cut is not None:
            local[name] = cut.take(state[name])
    model.load_state_dict(local, strict=False)


def find_cuts(model: nn.Module) -> dict[str, ParameterCut]:
    """Return name -> layer, shard dim and cut of every sharded parameter."""
    cuts = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TensorParallelLayer):
            for parameter, dim in module.shard_dims.items():
                cut = ParameterCut(module, dim, module.cut_of(parameter))
                cuts[f"{name}.{parameter}".lstrip(".")] = cut
        # Shards of another copy of this package would be taken for full tensors.
        elif any(kind.__name__ == TensorParallelLayer.__name__ for kind in type(module).__mro__):
            raise InvalidArgumentError(
                f"{describe_rank()}: module '{name}' is a {type(module).__module__}."
                f"{type(module).__name__}, of another copy of this library: use the copy that "
                "made the model parallel"
            )
    return cuts


def _check_names(problem: str, names: Iterable[str]) -> None:
    """Raise an error that lists the names, if there are any."""
    names = sorted(names)
    if names:
        raise InvalidArgumentError(f"{describe_rank()}: {problem} {', '.join(names)}")


def _check_shards(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors have names of the model and this rank's shapes."""
    known: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    known.update(model.named_buffers(remove_duplicate=False))
    _check_names("the model has no parameter or buffer", set(tensors) - set(known))
    for name, tensor in tensors.items():
        _check_shape(name, tensor, tuple(known[name].shape), "this rank's shard")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' is a {type(tensor).__name__}, not a tensor; leave it out"
        )
    if tuple(tensor.shape) != expected:
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' has shape {tuple(tensor.shape)}, "
            f"but {what} has {expected}"
        )


def _check_group(cuts: Mapping[str, ParameterCut], group: ProcessGroup | None) -> None:
    for cut in cuts.values() if group is not None else ():
        if get_world_size(group) != cut.layer.tp_size:
            raise InvalidArgumentError(
                f"{describe_rank()}: the group has {get_world_size(group)} ranks, "
                f"but the model was sharded over {cut.layer.tp_size}"
            )


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a model's state for torch.distributed.checkpoint, which can load it at any tp.

    It has the plain model's names and sizes and shares the model's memory: loading into the dict
    loads into the model. A shard is a `PiecesTensor`; all other entries are the model's own. Each
    chunk of a full tensor is saved once, so a plain model can load the checkpoint too.

    Example:
        >>> torch.distributed.checkpoint.save(sharded_state_dict(model), checkpoint_id=folder)
    """
    state: dict[str, Any] = dict(model.state_dict())
    for name, cut in find_cuts(model).items():
        local = state.get(name)
        if isinstance(local, Tensor) and cut.layer.tp_size > 1:
            ranges = cut.cut.ranges[cut.layer.tp_rank]
            state[name] = PiecesTensor(local, cut.whole(local.shape), cut.dim, ranges)
    return state


class PiecesTensor(Tensor):
    """A full tensor for checkpoints only; this rank holds pieces of it along one dim.

    It has the full shape but takes no memory. It lists for torch.distributed.checkpoint the chunks
    of the full tensor that this rank holds, and returns their data.
    """

    _local: Tensor
    _dim: int
    _ranges: tuple[range, ...]

    def __new__(
        cls, local: Tensor, shape: Sequence[int], dim: int, ranges: tuple[range, ...]
    ) -> PiecesTensor:
        """Wrap `local`, the concatenated `ranges` of the full tensor along `dim`."""
        whole: PiecesTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        whole._local, whole._dim, whole._ranges = local, dim, ranges
        return whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show the index ranges of the full tensor that this rank holds."""
        pieces = ", ".join(f"{r.start}:{r.stop}" for r in self._ranges)
        return f"PiecesTensor({pieces} along dim {self._dim} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> PiecesTensor:
        """Refuse to compute: no rank holds the full tensor."""
        whole: PiecesTensor = args[0]
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == whole.shape:
            # async_save starts a copy with this call, then copies the attributes.
            local = torch.empty_like(whole._local, device=(kwargs or {}).get("device"))
            return cls(local, whole.shape, whole._dim, whole._ranges)
        raise InvalidArgumentError(
            f"{describe_rank()}: {func} of a PiecesTensor, which describes a shard to "
            "torch.distributed.checkpoint and cannot compute: compute on the model's own "
            "parameters, and use gather_state_dict for full tensors"
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint import metadata, planner  # a slow import

        properties = metadata.TensorProperties.create_from_tensor(self._local)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(start, piece.shape) for start, piece in self._pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece for start, piece in self._pieces() if start == index.offset)

    def _pieces(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield the offsets and the values of each piece."""
        pieces = self._local.split([len(r) for r in self._ranges], self._dim)
        for held, piece in zip(self._ranges, pieces, strict=True):
            start = (held.start if d == self._dim else 0 for d in range(self.dim()))
            yield torch.Size(start), piece

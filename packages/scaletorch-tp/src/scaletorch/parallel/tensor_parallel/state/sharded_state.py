"""A model's state as tensors that torch.distributed.checkpoint can save and reshard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .whole import find_cuts

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's state for torch.distributed.checkpoint, which can load it at any tp.

    It has the plain model's names and sizes and shares the model's memory: loading into the dict
    loads into the model. A shard is a `PiecesTensor`; all other entries are the model's own. Each
    chunk of a full tensor is saved once, so a plain model can load the checkpoint too.

    Args:
        model: A model with tensor-parallel layers.

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
        for start, piece in self._pieces():
            if index.offset == start:
                return piece
        raise InvalidArgumentError(
            f"{describe_rank()}: no piece of '{index.fqn}' begins at {index.offset}; it is {self!r}"
        )

    def _pieces(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield the offsets and the values of each piece."""
        pieces = self._local.split([len(r) for r in self._ranges], self._dim)
        for held, piece in zip(self._ranges, pieces, strict=True):
            start = (held.start if d == self._dim else 0 for d in range(self.dim()))
            yield torch.Size(start), piece

"""A model's state as tensors that torch.distributed.checkpoint can save and reshard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....dist import get_comm_device
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .placements import Pieces, place
from .whole import ParameterCut, find_cuts

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh


def as_dtensors(model: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Return the model's state for torch.distributed.checkpoint, which can load it at any tp.

    It has the plain model's names and sizes and shares the model's memory: loading into the dict
    loads into the model. A tensor that `placements` calls `Shard` or `Replicate` is a DTensor, one
    that it calls `Pieces` a `PiecesTensor`. Both are saved once, as chunks of one full tensor, so a
    plain model can load them too. In one process tensors are plain. Entries that are not tensors
    do not change.

    Args:
        model: A model with tensor-parallel layers, all on one axis.
        mesh: The tensor-parallel axis, such as `manager.device_mesh["tp"]`; None creates one from
            the layers' group.

    Raises:
        InvalidArgumentError: The mesh is not the axis that the model was sharded over.

    Example:
        >>> torch.distributed.checkpoint.save(as_dtensors(model), checkpoint_id=folder)
    """
    cuts = find_cuts(model)
    mesh = _axis_mesh(cuts.values()) if mesh is None else _checked(mesh, cuts.values())
    return {
        name: _describe(value, cuts.get(name), mesh)
        if isinstance(value, Tensor) and mesh is not None
        else value
        for name, value in model.state_dict().items()
    }


class PiecesTensor(Tensor):
    """A full tensor of which this rank holds pieces along one dim, only for checkpoints.

    It has the full shape but takes no memory. It tells torch.distributed.checkpoint which chunks of
    the full tensor this rank holds, and returns their data.
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
            f"{describe_rank()}: {func} of a PiecesTensor: it describes a shard to "
            "torch.distributed.checkpoint, and cannot compute; compute on the model's own "
            "parameters, and use gather_state_dict where whole tensors are needed"
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(self._offsets(ours), piece.shape) for ours, piece in self._pieces()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for ours, piece in self._pieces():
            if index.offset == self._offsets(ours):
                return piece
        raise InvalidArgumentError(
            f"{describe_rank()}: no piece of '{index.fqn}' begins at {index.offset}; it is {self!r}"
        )

    def _offsets(self, ours: range) -> torch.Size:
        return torch.Size(ours.start if d == self._dim else 0 for d in range(len(self.shape)))

    def _pieces(self) -> Iterator[tuple[range, Tensor]]:
        pieces = self._local.split([len(ours) for ours in self._ranges], self._dim)
        return zip(self._ranges, pieces, strict=True)


def _describe(local: Tensor, cut: ParameterCut | None, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor  # a slow import

    placement = place(cut)
    shape = local.shape if cut is None else torch.Size(cut.whole(local.shape))
    if isinstance(placement, Pieces):
        return PiecesTensor(local, shape, placement.dim, placement.ranks[mesh.get_local_rank()])
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=shape, stride=stride
    )
    return whole


def _axis_mesh(cuts: Collection[ParameterCut]) -> DeviceMesh | None:
    """Make a mesh from the layers' group, without communication; None in one process."""
    from torch.distributed.device_mesh import DeviceMesh

    group = next((cut.layer.group for cut in cuts if cut.layer.tp_size > 1), None)
    return None if group is None else DeviceMesh.from_group(group, get_comm_device(group).type)


def _checked(mesh: DeviceMesh, cuts: Collection[ParameterCut]) -> DeviceMesh:
    if mesh.ndim != 1:
        raise InvalidArgumentError(
            f"{describe_rank()}: expected a mesh of the tensor-parallel axis alone, got one of "
            f"{mesh.ndim} dims; slice it, as in mesh['tp']"
        )
    for layer in (cut.layer for cut in cuts):
        expected, got = (layer.tp_rank, layer.tp_size), (mesh.get_local_rank(), mesh.size())
        if got != expected:
            raise InvalidArgumentError(
                f"{describe_rank()}: the mesh has this rank as number {got[0]} of {got[1]}, "
                f"but the model was sharded with it as number {expected[0]} of {expected[1]}"
            )
    return mesh

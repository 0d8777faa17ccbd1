"""Point-to-point messages between neighbouring stages, by the name of the operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import exchange, get_rank, group_ranks
from ...dist.errors import InvalidArgumentError
from ..pg_manager import axis_group, describe_rank
from .runtime.forms import checked_dtype, checked_shape

# Offsets along the pipeline of the rank to send to and the rank to receive from; 0 if none.
_Ends = tuple[int, int]
_ONE_WAY: dict[str, _Ends] = {
    "recv_forward": (0, -1),
    "send_forward": (1, 0),
    "recv_backward": (0, 1),
    "send_backward": (-1, 0),
}
_BOTH_WAYS: dict[str, _Ends] = {"send_fwd_recv_bwd": (1, 1), "send_bwd_recv_fwd": (-1, -1)}


def pipeline_communicate(
    operation: str,
    device: torch.device | str,
    dtype: torch.dtype,
    tensor: Tensor | None = None,
    shapes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor | None:
    """Send to or receive from a neighbouring stage; do nothing if there is none.

    Args:
        operation: `recv_forward`, `send_forward`, `recv_backward` or `send_backward`.
        device: Device of a received tensor.
        dtype: Dtype of the tensor sent or received.
        tensor: The tensor to send.
        shapes: Shape of the received tensor, `[B, L, H]`.
        group: The stages in order; None is the manager's pp axis.

    Returns:
        The received tensor; None when sending, or if there is no such neighbour. Hidden states
        of the previous stage are a leaf that requires grad while grad is enabled.

    Raises:
        InvalidArgumentError: Unknown operation, or nothing to send or receive into.
    """
    return _communicate(operation, _ONE_WAY, tensor, shapes, torch.device(device), dtype, group)


def bidirectional_pipeline_communicate(
    operation: str,
    send_tensor: Tensor | None,
    recv_shapes: Sequence[int] | None,
    device: torch.device | str,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
) -> Tensor | None:
    """Send to a neighbouring stage and receive from it in one exchange, which cannot deadlock.

    `operation` is `send_fwd_recv_bwd` (next stage) or `send_bwd_recv_fwd` (previous stage). Other
    arguments, the result and errors are those of `pipeline_communicate`.
    """
    return _communicate(
        operation, _BOTH_WAYS, send_tensor, recv_shapes, torch.device(device), dtype, group
    )


def _communicate(
    name: str,
    operations: Mapping[str, _Ends],
    tensor: Tensor | None,
    shape: Sequence[int] | None,
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> Tensor | None:
    if name not in operations:
        message = f"unknown operation {name!r}: expected one of {', '.join(operations)}"
        raise InvalidArgumentError(message)
    group, dtype = axis_group("pp", group), checked_dtype(dtype)
    ranks = group_ranks(group)
    stage = ranks.index(get_rank())
    to, source = (
        ranks[stage + steps] if steps and 0 <= stage + steps < len(ranks) else None
        for steps in operations[name]
    )
    sends = [] if to is None else [(_sent(name, tensor, dtype), to)]
    recvs: list[tuple[Tensor, int]] = []
    if source is not None:
        sizes = checked_shape(shape if shape is not None else ())
        recvs.append((torch.empty(sizes, dtype=dtype, device=device), source))
    if sends or recvs:
        exchange(sends, recvs, group=group)
    if not recvs:
        return None
    hidden = operations[name][1] < 0  # received from the previous stage
    return recvs[0][0].requires_grad_(hidden and torch.is_grad_enabled())


def _sent(name: str, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if tensor is None:
        raise InvalidArgumentError(f"{describe_rank()}: {name} needs a tensor to send, got None")
    if tensor.dtype != dtype:
        raise InvalidArgumentError(
            f"{describe_rank()}: {name} was given a {tensor.dtype} tensor to send as {dtype}; "
            "cast it first: the receiver reads its bits as that dtype"
        )
    return tensor

"""Point-to-point messages between neighbouring stages, by the name of the operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import exchange, get_rank, group_ranks
from ...dist.errors import InvalidArgumentError
from ..pg_manager import axis_group, describe_rank
from .runtime.forms import checked_dtype, checked_shape

# Offsets along the pipeline of the rank to send to and the rank to receive from; 0 if none.
_ENDS: dict[str, tuple[int, int]] = {
    "recv_forward": (0, -1),
    "send_forward": (1, 0),
    "recv_backward": (0, 1),
    "send_backward": (-1, 0),
    "send_fwd_recv_bwd": (1, 1),
    "send_bwd_recv_fwd": (-1, -1),
}


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
        operation: `recv_forward`, `send_forward`, `recv_backward` or `send_backward`, or one of
            `bidirectional_pipeline_communicate`.
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
    if operation not in _ENDS:
        message = f"unknown operation {operation!r}: expected one of {', '.join(_ENDS)}"
        raise InvalidArgumentError(message)
    group, dtype = axis_group("pp", group), checked_dtype(dtype)
    ranks = group_ranks(group)
    stage = ranks.index(get_rank())
    to, source = (
        ranks[stage + steps] if steps and 0 <= stage + steps < len(ranks) else None
        for steps in _ENDS[operation]
    )
    sends = [] if to is None else [(_sent(operation, tensor, dtype), to)]
    recvs: list[tuple[Tensor, int]] = []
    if source is not None:
        sizes = checked_shape(shapes if shapes is not None else ())
        recvs.append((torch.empty(sizes, dtype=dtype, device=torch.device(device)), source))
    if sends or recvs:
        exchange(sends, recvs, group=group)
    if not recvs:
        return None
    hidden = _ENDS[operation][1] < 0  # received from the previous stage
    return recvs[0][0].requires_grad_(hidden and torch.is_grad_enabled())


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
    if 0 in _ENDS.get(operation, ()):
        raise InvalidArgumentError(f"{operation!r} goes one way: call pipeline_communicate")
    return pipeline_communicate(operation, device, dtype, send_tensor, recv_shapes, group)


def _sent(name: str, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if tensor is None:
        raise InvalidArgumentError(f"{describe_rank()}: {name} needs a tensor to send, got None")
    if tensor.dtype != dtype:
        raise InvalidArgumentError(
            f"{describe_rank()}: {name} was given a {tensor.dtype} tensor to send as {dtype}; "
            "cast it first: the receiver reads its bits as that dtype"
        )
    return tensor

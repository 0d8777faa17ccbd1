"""The documented calls between neighbouring stages, on real ranks."""

import pytest
import torch

from scaletorch.dist import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import (
    bidirectional_pipeline_communicate,
    pipeline_communicate,
)

SHAPE = (2, 3, 4)
CPU, DTYPE = torch.device("cpu"), torch.float32


def filled(value):
    return torch.full(SHAPE, float(value))


def stages(group):
    rank = torch.distributed.get_rank(group)
    return rank, torch.distributed.get_world_size(group)


@distributed_test(world_size=3)
def test_along_the_pipeline_and_back():
    group = torch.distributed.group.WORLD
    stage, size = stages(group)
    hidden = pipeline_communicate("recv_forward", CPU, DTYPE, shapes=SHAPE, group=group)
    if stage == 0:
        assert hidden is None
    else:
        assert torch.equal(hidden, filled(stage - 1))
        assert hidden.is_leaf
        assert hidden.requires_grad
    sent = pipeline_communicate("send_forward", CPU, DTYPE, filled(stage), group=group)
    assert sent is None
    gradient = pipeline_communicate("recv_backward", "cpu", DTYPE, shapes=SHAPE, group=group)
    if stage == size - 1:
        assert gradient is None
    else:
        assert torch.equal(gradient, filled(-stage - 1))
        assert not gradient.requires_grad
    pipeline_communicate("send_backward", CPU, DTYPE, filled(-stage), group=group)


@distributed_test(world_size=2)
def test_both_ways_at_once():
    group = torch.distributed.group.WORLD
    stage, _ = stages(group)
    ends = {0: "send_bwd_recv_fwd", 1: "send_fwd_recv_bwd"}
    arguments = (filled(stage), SHAPE, CPU, DTYPE, group)
    assert bidirectional_pipeline_communicate(ends[stage], *arguments) is None
    received = bidirectional_pipeline_communicate(ends[1 - stage], *arguments)
    assert torch.equal(received, filled(1 - stage))
    assert received.requires_grad == (stage == 1)


@distributed_test(world_size=2)
def test_no_grad_and_strided_tensors():
    group = torch.distributed.group.WORLD
    stage, _ = stages(group)
    tensor = torch.arange(24.0).view(4, 3, 2).transpose(0, 2)
    assert not tensor.is_contiguous()
    with torch.no_grad():
        if stage == 0:
            pipeline_communicate("send_forward", CPU, DTYPE, tensor, group=group)
        else:
            hidden = pipeline_communicate("recv_forward", CPU, DTYPE, shapes=SHAPE, group=group)
            assert torch.equal(hidden, tensor)
            assert not hidden.requires_grad


@distributed_test(world_size=4)
def test_the_managers_axis_is_the_default():
    manager = setup_process_group_manager(pp_size=2, dp_size=2)
    if manager.pp_is_first_stage:
        pipeline_communicate("send_forward", CPU, DTYPE, filled(manager.dp_rank))
    else:
        hidden = pipeline_communicate("recv_forward", CPU, DTYPE, shapes=SHAPE)
        assert torch.equal(hidden, filled(manager.dp_rank))


@distributed_test(world_size=2)
def test_missing_arguments():
    group = torch.distributed.group.WORLD
    with pytest.raises(StateError, match="pass group="):
        pipeline_communicate("recv_forward", CPU, DTYPE, shapes=SHAPE)
    stage, _ = stages(group)
    send, receive = (("send_forward", "recv_backward"), ("send_backward", "recv_forward"))[stage]
    with pytest.raises(InvalidArgumentError, match=f"rank {stage}: {send} needs a tensor"):
        pipeline_communicate(send, CPU, DTYPE, group=group)
    with pytest.raises(InvalidArgumentError, match=r"float64 tensor to send as torch\.float32"):
        pipeline_communicate(send, CPU, DTYPE, filled(0).double(), group=group)
    for shapes in (None, (2, 0), 3, (2, 1.5)):
        with pytest.raises(InvalidArgumentError, match="tensor_shapes is the shape"):
            pipeline_communicate(receive, CPU, DTYPE, shapes=shapes, group=group)


def test_one_process_has_no_neighbours():
    for operation in ("recv_forward", "send_forward", "recv_backward", "send_backward"):
        assert pipeline_communicate(operation, CPU, DTYPE, filled(0), SHAPE) is None
    for operation in ("send_fwd_recv_bwd", "send_bwd_recv_fwd"):
        assert bidirectional_pipeline_communicate(operation, None, None, CPU, DTYPE) is None


def test_unknown_operations_and_dtypes():
    with pytest.raises(InvalidArgumentError, match="'forward': expected one of recv_forward, send"):
        pipeline_communicate("forward", CPU, DTYPE)
    with pytest.raises(InvalidArgumentError, match="expected one of send_fwd_recv_bwd, send_bwd"):
        bidirectional_pipeline_communicate("recv_forward", None, None, CPU, DTYPE)
    with pytest.raises(InvalidArgumentError, match=r"got torch\.int64"):
        pipeline_communicate("recv_forward", CPU, torch.int64, shapes=SHAPE)

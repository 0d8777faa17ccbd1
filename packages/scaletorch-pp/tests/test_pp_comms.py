"""The documented calls between neighbouring stages, on real ranks."""

import pytest
import torch
from one_process import Net, accumulate, pair, require_same, sum_loss, token_batches, world

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


def call(operation, tensor=None, shapes=SHAPE, dtype=DTYPE):
    return pipeline_communicate(operation, CPU, dtype, tensor, shapes, world())


@distributed_test(world_size=3)
def test_along_the_pipeline_and_back():
    stage, last = world().rank(), world().size() - 1
    hidden = call("recv_forward")
    assert (hidden is None) == (stage == 0)
    if stage:
        assert torch.equal(hidden, filled(stage - 1))
        assert hidden.is_leaf
        assert hidden.requires_grad
    assert call("send_forward", filled(stage)) is None
    gradient = call("recv_backward")
    assert (gradient is None) == (stage == last)
    if stage < last:
        assert torch.equal(gradient, filled(-stage - 1))
        assert not gradient.requires_grad
    call("send_backward", filled(-stage))


@distributed_test(world_size=2)
def test_both_ways_at_once():
    stage = world().rank()
    ends = {0: "send_bwd_recv_fwd", 1: "send_fwd_recv_bwd"}
    arguments = (filled(stage), SHAPE, CPU, DTYPE, world())
    assert bidirectional_pipeline_communicate(ends[stage], *arguments) is None
    received = bidirectional_pipeline_communicate(ends[1 - stage], *arguments)
    assert torch.equal(received, filled(1 - stage))
    assert received.requires_grad == (stage == 1)


@distributed_test(world_size=2)
def test_no_grad_and_strided_tensors():
    tensor = torch.arange(24.0).view(4, 3, 2).transpose(0, 2)
    assert not tensor.is_contiguous()
    with torch.no_grad():
        if world().rank() == 0:
            call("send_forward", tensor)
        else:
            hidden = call("recv_forward")
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
    with pytest.raises(StateError, match="pass group="):
        pipeline_communicate("recv_forward", CPU, DTYPE, shapes=SHAPE)
    stage = world().rank()
    send, receive = (("send_forward", "recv_backward"), ("send_backward", "recv_forward"))[stage]
    with pytest.raises(InvalidArgumentError, match=f"rank {stage}: {send} needs a tensor"):
        call(send)
    with pytest.raises(InvalidArgumentError, match=r"float64 tensor to send as torch\.float32"):
        call(send, filled(0).double())
    for shapes in (None, (2, 0), 3, (2, 1.5)):
        with pytest.raises(InvalidArgumentError, match="tensor_shapes is the shape"):
            call(receive, shapes=shapes)


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


class TakesEmbeddings(Net):
    def forward(self, input_ids=None, inputs_embeds=None):
        return self.head(
            self.run(self.embed(input_ids) if input_ids is not None else inputs_embeds)
        )


@distributed_test(world_size=3)
def test_a_loop_of_ones_own_trains_as_one_process():
    for kind in (Net, TakesEmbeddings):
        plain, stage = pair(kind)
        for batch in token_batches(2):
            hidden = call("recv_forward", dtype=torch.float64)
            output = stage(batch["input_ids"] if hidden is None else hidden)
            if stage.is_last_stage:
                output = sum_loss(output, batch)
            call("send_forward", output.detach(), dtype=torch.float64)
            gradient = call("recv_backward", dtype=torch.float64)
            gradient = stage.backward(hidden, output, gradient)
            call("send_backward", gradient, dtype=torch.float64)
        accumulate(plain, token_batches(2))
        require_same(stage, plain, exact=True)

"""Messages between stages: the documented calls, and batches that wait until all messages meet."""

import threading
from datetime import timedelta
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch.distributed as c10d
from one_process import (
    Net,
    accumulate,
    build,
    pair,
    require_same,
    split,
    sum_loss,
    token_batches,
    trains_on,
    world,
)
from torch import nn

from scaletorch.dist import InvalidArgumentError, RankFailedError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import groups as pg_groups
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    StageError,
    bidirectional_pipeline_communicate,
    pipeline_communicate,
    pipeline_forward,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.runtime import mail
from scaletorch.parallel.pipeline_parallel.stages import ties

# The module, which its package shows as its function.
simulate = import_module("scaletorch.parallel.pipeline_parallel.schedules.simulate")
SHAPE = (2, 3, 4)
CPU, DTYPE = torch.device("cpu"), torch.float32


def filled(value):
    return torch.full(SHAPE, float(value))


def call(operation, tensor=None, shapes=SHAPE, dtype=DTYPE):
    return pipeline_communicate(operation, CPU, dtype, tensor, shapes, world())


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
    with pytest.raises(InvalidArgumentError, match=r"'both': .*, send_fwd_recv_bwd, send_bwd_recv"):
        bidirectional_pipeline_communicate("both", None, None, CPU, DTYPE)
    with pytest.raises(InvalidArgumentError, match="'recv_forward' goes one way: call"):
        bidirectional_pipeline_communicate("recv_forward", None, None, CPU, DTYPE)
    with pytest.raises(InvalidArgumentError, match=r"got torch\.int64"):
        pipeline_communicate("recv_forward", CPU, torch.int64, shapes=SHAPE)


class TakesEmbeddings(Net):
    def forward(self, input_ids=None, inputs_embeds=None):
        x = self.embed(input_ids) if input_ids is not None else inputs_embeds
        return self.head(self.run(x))


class PassesOn(TakesEmbeddings):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@distributed_test(world_size=3)
def test_a_loop_of_ones_own_trains_as_one_process():
    for kind in (Net, PassesOn):
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


TRAINING = [name for name in SCHEDULES if name != "forward_only"]
MESSAGE, ANSWER = 0, 1  # tags


class Done:
    def wait(self):
        pass


class Rendezvous:
    """Stands in for `exchange`: each message is answered, and the batch waits for all answers.

    That is stricter than NCCL, which blocks the host so at the first exchange of two ranks alone.
    """

    def __init__(self, seconds):
        self.timeout = timedelta(seconds=seconds)
        self.paths = []  # of each message the ranks of its group, its peer, whether it is sent

    def __call__(self, sends=(), recvs=(), group=None, async_op=False):
        members = tuple(c10d.get_process_group_ranks(group))
        for peers in ([peer for _, peer in sends], [peer for _, peer in recvs]):
            # NCCL runs the second message to a rank after the first one from there, which may be
            # an answer to the second.
            assert len(peers) == len(set(peers))
        self.paths += [(members, peer, True) for _, peer in sends]
        self.paths += [(members, peer, False) for _, peer in recvs]
        come = [(c10d.irecv(t, peer, group, MESSAGE), peer) for t, peer in recvs]
        gone = [c10d.isend(t.contiguous(), peer, group, MESSAGE) for t, peer in sends]
        answers = [c10d.irecv(torch.empty(1), peer, group, ANSWER) for _, peer in sends]
        errors = []

        def end(works, peer=None):
            try:
                for work in works:
                    work.wait(self.timeout)
                if peer is not None:
                    c10d.isend(torch.ones(1), peer, group, ANSWER).wait(self.timeout)
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=end, args=([work], peer)) for work, peer in come]
        threads.append(threading.Thread(target=end, args=([*gone, *answers],)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise TimeoutError("the other end of a message did not come") from errors[0]
        return Done()


class Layer(nn.Module):
    """Passes on two tensors, which go to one rank by two messages."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, state):
        x, y = state if isinstance(state, tuple) else (state, state * 2)
        return x + self.one(y).tanh(), y + self.two(x).tanh()


class Head(nn.Linear):
    def forward(self, state):
        return super().forward(state[0] + state[1])


class TwoTensors(Net):
    layer = Layer

    def __init__(self, tied):
        super().__init__()
        self.head = Head(4, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def failing(output, batch):
    raise ZeroDivisionError("boom")


def in_batches(exchange):
    """Patches that let messages go as on a device with streams."""
    for module in (mail, pg_groups, ties):
        patch.object(module, "exchange", exchange).start()
    for module in (mail, pg_groups):
        patch.object(module, "has_streams", lambda group: True).start()


def train(exchange, schedule, tied):
    exchange.paths.clear()
    plain, stage = pair(TwoTensors, tied, schedule=schedule)
    connected = set(exchange.paths)
    for count in (1, 4):
        trains_on(stage, plain, token_batches(count), exact=False)
    with pytest.raises((ZeroDivisionError, StageError), match="boom"):
        train_step_pipeline(stage, token_batches(4), loss_fn=failing)
    batches = token_batches(2)
    for output, batch in zip(pipeline_forward(stage, batches), batches, strict=False):
        torch.testing.assert_close(output, plain(batch["input_ids"]))
    assert set(exchange.paths) == connected  # no step is the first to use any
    return {members for members, _, _ in connected}, stage.tied_parameters.values()


def every_schedule():
    """Run every schedule, on two ranks with ties or without, and on four the other way."""
    exchange = Rendezvous(50)
    in_batches(exchange)
    everyone = tuple(range(c10d.get_world_size()))
    try:
        for index, schedule in enumerate(TRAINING):
            groups, owners = train(exchange, schedule, (index + len(everyone) // 2) % 2 > 0)
            mine = {each for each in owners if c10d.get_rank() in each}
            assert groups == {everyone, *mine}  # ties go by a group of their owners alone
    finally:
        patch.stopall()


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_schedule_passes_where_all_messages_meet(world_size):
    run_ranks(every_schedule, world_size, timeout=110)


def send_late(stage):
    """Rank 1 sends the rank before it nothing until it has received all of the rank behind."""
    program_of = simulate.program_of

    def late(*args):
        return sorted(
            program_of(*args), key=lambda each: isinstance(each, simulate.Send) and not each.peer
        )

    if stage.rank == 1:
        simulate.plan_of.cache_clear()
        patch.object(simulate, "program_of", late).start()


def sum_ties_early(stage):
    """Rank 0 sums what it holds with the last rank before it sends that one anything."""
    flush = mail.Posts.flush

    def flush_after_ties(self):
        if self._batch[0]:
            stage.sync_tied_gradients()
        flush(self)

    if stage.rank == 0:
        patch.object(mail.Posts, "flush", flush_after_ties).start()


def train_with(plant):
    exchange = Rendezvous(100)
    in_batches(exchange)
    stage = split(build(Net, tied=True))
    train_step_pipeline(stage, token_batches(8), loss_fn=sum_loss)
    plant(stage)
    exchange.timeout = timedelta(seconds=2)
    train_step_pipeline(stage, token_batches(8), loss_fn=sum_loss)


@pytest.mark.parametrize("plant", [send_late, sum_ties_early])
def test_a_wrong_order_is_seen(plant):
    with pytest.raises(RankFailedError, match="the other end of a message did not come"):
        run_ranks(train_with, 4, plant, timeout=110)

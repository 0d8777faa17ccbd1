"""Pipelines whose batches of messages block the host until both ends of every message are there.

That is stricter than NCCL, which blocks the host so at the first exchange of two ranks alone.
"""

import threading
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as c10d
from one_process import Net, build, pair, split, sum_loss, token_batches, trains_on
from torch import nn

from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import groups as pg_groups
from scaletorch.parallel.pipeline_parallel import (
    SCHEDULES,
    StageError,
    pipeline_forward,
    train_step_pipeline,
)
from scaletorch.parallel.pipeline_parallel.runtime import mail
from scaletorch.parallel.pipeline_parallel.schedules import program
from scaletorch.parallel.pipeline_parallel.stages import ties

TRAINING = [name for name in SCHEDULES if name != "forward_only"]
MESSAGE, ANSWER = 0, 1  # tags


class Done:
    def wait(self):
        pass


class Rendezvous:
    """Stands in for `exchange`: each message is answered, and the batch waits for all answers."""

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
    program_of = program.program_of

    def late(*args):
        return sorted(
            program_of(*args), key=lambda each: isinstance(each, program.Send) and not each.peer
        )

    if stage.rank == 1:
        program.plan_of.cache_clear()
        patch.object(program, "program_of", late).start()


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

"""Under a guard, what one rank raises in a step reaches every rank of the job, and whose it is."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from scaletorch import guard
from scaletorch.dist import RankFaultError, all_reduce, get_rank, init_dist, launch
from scaletorch.dist.errors import StateError
from scaletorch.dist.startup.rendezvous import free_port
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import DataParallelBucket, shard_optimizer
from scaletorch.parallel.pg_manager import describe_rank, setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel, Split, train_step_pipeline


class Layer(nn.Linear):
    fails = False

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        if self.fails:
            raise ValueError("my own bug\nand more of it")
        return super().forward(x).tanh()


def batches(fails=False):
    ids = torch.arange(8).view(2, 4) % 4
    yield from [{"input_ids": ids, "labels": ids}] * 2
    if fails:
        raise OSError("my own bug\nand more of it")
    yield {"input_ids": ids, "labels": ids}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 4), *[Layer() for _ in range(4)])


def guarded(train, *args, label=None):
    """Return what a rank has heard: of which ranks, and in what words."""
    try:
        with guard.watch(label=label):
            train(*args)
    except RankFaultError as fault:
        return fault.ranks, str(fault)
    except (StateError, ValueError, OSError) as error:
        return "raised", str(error)
    return None


def pipeline(victim, place):
    """Train two stages, with gradients summed over the data parallel ranks."""
    manager = setup_process_group_manager(pp_size=2, dp_size=2)
    stage = PipelineParallel(make(), Split(points=("2",)))
    for step in range(4):
        now = get_rank() == victim and step == 2
        Layer.fails = now and place == "forward"
        train_step_pipeline(stage, batches(now and place == "loader"))
        for parameter in stage.parameters():
            torch.distributed.all_reduce(parameter.grad, group=manager.dp_group)
        guard.step()


@pytest.mark.parametrize(("victim", "place"), [(0, "forward"), (3, "forward"), (3, "loader")])
def test_every_rank_hears_what_a_stage_raised(victim, place):
    kind = "ValueError" if place == "forward" else "OSError"
    for rank, heard in enumerate(run_ranks(guarded, 4, pipeline, victim, place)):
        if rank == victim:
            assert heard == ("raised", "my own bug\nand more of it")
        else:
            assert heard[0] == (victim,)
            assert heard[1].startswith(f"rank {victim} raised {kind}: my own bug")


def buckets(change):
    """Train a few steps; in the third, rank 1 does something else, which it alone refuses."""
    torch.manual_seed(0)
    model = DataParallelBucket(nn.Linear(4, 4), group=torch.distributed.group.WORLD)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(4):
        now = step == 2 and get_rank() == 1
        if now and change == "parameter":
            model.module.extra = nn.Parameter(torch.zeros(1))
        model.require_backward_grad_sync = not (now and change == "no_sync")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()


CAUSES = {
    "parameter": "extra came after the module was wrapped",
    "no_sync": "has not been synchronised",
}


@pytest.mark.parametrize("change", CAUSES)
def test_the_others_hear_what_a_rank_refused(change):
    for rank, heard in enumerate(run_ranks(guarded, 3, buckets, change, timeout=200)):
        assert heard[0] == ("raised" if rank == 1 else (1,))
        assert CAUSES[change] in heard[1]


def experts():
    manager = setup_process_group_manager(dp_size=4, ep_size=2)
    return guarded(fail_among_experts, manager, label=describe_rank)


def fail_among_experts(manager):
    if manager.global_rank == 3:
        raise ValueError("no such expert")
    all_reduce(torch.ones(1), group=manager.ep_group if manager.global_rank == 2 else None)


def test_the_guard_names_experts_and_their_groups():
    # Fresh ranks: after a fault their groups are broken.
    said = launch(experts, 4, timeout=200)
    assert said[3] == ("raised", "no such expert")
    for _, message in said[:3]:
        assert "rank 3 (dp3 pp0 cp0 tp0 edp1 ep1 etp0) raised ValueError: no such expert" in message
    assert "in ep" in said[0][1]
    assert "rank 2 (dp2 pp0 cp0 tp0 edp1 ep0 etp0)" in said[0][1]


def stopped():
    """Train on two ranks of which the first, which holds the store, stops."""
    init_dist(backend="gloo", timeout=20)
    manager = setup_process_group_manager(pp_size=2)
    stage = PipelineParallel(make(), Split(points=("2",)), manager.pp_group)
    with guard.watch(patience=3.0):
        for step in range(10):
            if get_rank() == 0 and step == 5:
                os.kill(os.getpid(), signal.SIGSTOP)
            train_step_pipeline(stage, batches())
            guard.step()


def test_a_rank_that_stops_with_the_store_leaves_nobody_waiting():
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, told = ranks[1].communicate(timeout=200)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode == 1
    assert "RankFaultError: rank 0 has kept other ranks waiting" in told


if __name__ == "__main__":
    stopped()

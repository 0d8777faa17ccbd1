"""Under a guard, what a stage raises reaches every rank of the job, and who raised it."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from scaletorch import guard
from scaletorch.dist import RankFaultError, get_rank, init_dist
from scaletorch.dist.startup.rendezvous import free_port
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.pipeline_parallel import PipelineParallel, Split, train_step_pipeline


class Layer(nn.Linear):
    fails = False

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        if self.fails:
            raise ValueError("my own bug\nand more of it")
        return super().forward(x).tanh()


def batches():
    ids = torch.arange(8).view(2, 4) % 4
    return [{"input_ids": ids, "labels": ids}] * 3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 4), *[Layer() for _ in range(4)])


def loader(fails):
    yield from batches()[:2]
    if fails:
        raise OSError("my own bug\nand more of it")


def job(victim, place):
    """Train, with gradients summed over the data parallel ranks; return what a rank has heard."""
    manager = setup_process_group_manager(pp_size=2, dp_size=2)
    stage = PipelineParallel(make(), Split(points=("2",)))
    rank = get_rank()
    try:
        with guard.watch():
            for step in range(4):
                now = rank == victim and step == 2
                Layer.fails = now and place == "forward"
                train_step_pipeline(stage, loader(now and place == "loader"))
                for parameter in stage.parameters():
                    torch.distributed.all_reduce(parameter.grad, group=manager.dp_group)
                guard.step()
    except RankFaultError as fault:
        return "told", fault.kind, fault.ranks, str(fault).partition("\n")[0]
    except (ValueError, OSError) as error:
        return "raised", str(error)
    return None


@pytest.mark.parametrize(("victim", "place"), [(0, "forward"), (3, "forward"), (3, "loader")])
def test_every_rank_hears_the_exception_and_whose_it_is(victim, place):
    kind = "ValueError" if place == "forward" else "OSError"
    for rank, heard in enumerate(run_ranks(job, 4, victim, place)):
        if rank == victim:
            assert heard == ("raised", "my own bug\nand more of it")
        else:
            assert heard[:3] == ("told", "exception", (victim,))
            assert f"rank {victim}" in heard[3]
            assert f"{kind}: my own bug" in heard[3]


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

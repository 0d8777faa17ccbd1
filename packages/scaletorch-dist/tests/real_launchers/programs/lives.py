"""Dies by SIGKILL in each of its first lives: lives.py LOG DEATHS."""

import os
import pathlib
import signal
import sys
import time

import torch

import scaletorch.dist as dist

log, deaths = pathlib.Path(sys.argv[1]), int(sys.argv[2])
dist.init_dist(backend="gloo", timeout=40)
data = torch.ones(1)
dist.all_reduce(data)
if dist.get_rank() == 0:
    with log.open("a") as file:
        file.write(f"{int(data.item())} of {dist.get_world_size()}\n")
dist.barrier()
if len(log.read_text().splitlines()) <= deaths:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until the agent ends the others
dist.cleanup_dist()

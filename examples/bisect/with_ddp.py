"""`DistributedDataParallel`; each rank has its own rows.

`torchrun --nproc-per-node=2 with_ddp.py runs/ddp`; `--no-sync` runs the step under
`no_sync`, so that ranks keep their own gradients.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from small import batch, build, loss_sum
from torch.nn.parallel import DistributedDataParallel

from scaletorch import bisect


def step(folder: str, *, synchronised: bool = True) -> DistributedDataParallel:
    """Train one step on this rank's rows, recorded."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build())
    ids, labels = batch()
    total, count = len(ids), (labels != -100).sum()
    rows = list(range(rank * total // ranks, (rank + 1) * total // ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bisect.record(folder, model=model, describe={"rows": (rows, total)}) as tape:
        # DDP averages gradients; multiply by the number of ranks to get a sum.
        with nullcontext() if synchronised else model.no_sync():
            loss = loss_sum(model(ids[rows]), labels[rows]) / count * ranks
            loss.backward()
        dist.all_reduce(mean := loss.detach() / ranks)
        tape.put("loss", mean)
        optimizer.step()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    step(sys.argv[1], synchronised="--no-sync" not in sys.argv)
    dist.destroy_process_group()

"""FSDP2: sharded parameters, gradients and optimizer state; each rank has its own rows.

`torchrun --nproc-per-node=2 with_fsdp2.py runs/fsdp2`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small import Decoder, batch, build, loss_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scaletorch import bisect


def step(folder: str) -> Decoder:
    """Train one step on every n-th row, recorded."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, mesh = build(), init_device_mesh("cpu", (ranks,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    ids, labels = batch()
    rows = list(range(rank, len(ids), ranks))
    count = (labels != -100).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bisect.record(folder, model=model, describe={"rows": (rows, len(ids))}) as tape:
        loss = loss_sum(model(ids[rows]), labels[rows]) / count * ranks
        loss.backward()
        dist.all_reduce(mean := loss.detach() / ranks)
        tape.put("loss", mean)
        optimizer.step()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    step(sys.argv[1])
    dist.destroy_process_group()

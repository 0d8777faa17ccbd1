"""A mean of means under FSDP2: https://github.com/pytorch/torchtitan/issues/1842 (torch 2.13)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from scaletorch import bisect

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)).double()
ids = torch.randint(32, (4, 8))
labels = ids.masked_fill(torch.arange(8) > 7 - 2 * torch.arange(4)[:, None], -100)
own = labels[rank::ranks]  # later rows have fewer labels than earlier ones
if ranks > 1:
    dist.init_process_group("gloo")
    fully_shard(model)  # averages the ranks' gradients
with bisect.record(sys.argv[1], model, describe={"rows": (range(rank, 4, ranks), 4)}) as tape:
    losses = nn.functional.cross_entropy(model(ids[rank::ranks]).mT, own, reduction="sum")
    count = (labels != -100).sum() / ranks if "--mended" in sys.argv else (own != -100).sum()
    loss = losses / count
    loss.backward()
    if ranks > 1:
        dist.all_reduce(loss.data, dist.ReduceOp.AVG)
    tape.put("loss", loss)

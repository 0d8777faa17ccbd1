"""A norm on sequence shards: https://github.com/NVIDIA/Megatron-LM/issues/1446 (torch 2.13)."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from scaletorch import bisect

torch.manual_seed(0)
ids, norm, head = torch.randint(32, (4, 8)), nn.LayerNorm(16), nn.Linear(16, 32)
model = nn.Sequential(nn.Embedding(32, 16), norm, head).double()
plan: dict[str, tp.ParallelStyle] = {
    "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "2": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
if "--mended" in sys.argv:
    plan["1"] = tp.SequenceParallel()
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    tp.parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (2,)), plan)
with bisect.record(sys.argv[1], model) as tape:
    loss = nn.functional.cross_entropy(model(ids).mT, ids.roll(-1, 1))
    loss.backward()
    tape.put("loss", loss)

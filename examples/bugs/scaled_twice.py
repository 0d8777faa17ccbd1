"""Gradients scaled in each of two steps: https://github.com/pytorch/torchtitan/pull/1732 (2.13)."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from scaletorch import bisect

rank, mended = int(os.environ.get("RANK", "-1")), "--mended" in sys.argv
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
layers = model if rank < 0 else model[rank : rank + 1]
x, parts = torch.randn(8, 8).double(), 4 if mended else 2  # divisor of a micro-batch's loss
if rank >= 0:
    dist.init_process_group("gloo")
    shape = x[:2].clone().requires_grad_()  # of each message; otherwise torch calls stages for it
    stage = PipelineStage(layers, rank, 2, x.device, (shape,), (shape,))
    model = ScheduleGPipe(stage, 2, lambda *y: nn.MSELoss()(*y) / parts, scale_grads=not mended)
rows = None if rank < 0 else {"rows": ([range(i, i + 2) for i in range(0, 8, 2)], 8)}
with bisect.record(sys.argv[1], nn.ModuleDict(layers.named_children()), describe=rows):
    if rank < 0:
        nn.MSELoss()(model(x), x).backward()
    for half in x.chunk(2) if rank >= 0 else ():  # two steps of two micro-batches each
        model.step(*[half][rank:], target=half)

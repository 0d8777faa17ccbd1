"""Gradients scaled at each of two steps: https://github.com/pytorch/torchtitan/pull/1732 (2.13)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from scaletorch import bisect

rank, parts = int(os.environ.get("RANK", "-1")), 4 if "--mended" in sys.argv else 2
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double(), torch.randn(8, 8).double()
rows = range(8) if rank < 0 else [range(row, row + 2) for row in range(0, 8, 2)]
with bisect.record(sys.argv[1], model, describe={"rows": (rows, 8)}) as tape:
    loss, losses = torch.zeros(()).double(), list[Tensor]()
    if rank < 0:
        (loss := nn.functional.mse_loss(model(x), x)).backward()
    else:
        dist.init_process_group("gloo")
        stage, scaled = PipelineStage(model[rank], rank, 2, torch.device("cpu")), parts == 2
        loss_fn = nn.MSELoss()
        schedule = ScheduleGPipe(stage, 2, lambda *y: loss_fn(*y) / parts, scale_grads=scaled)
        for half in x.chunk(2):  # two steps of two micro-batches each
            schedule.step(*[half][rank:], target=half, losses=losses)
            loss += sum(losses) * parts / 4
        dist.all_reduce(loss)
    tape.put("loss", loss)

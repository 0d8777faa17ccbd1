"""Scores of sharded experts: https://github.com/pytorch/torchtitan/issues/2387 (torch 2.13)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from scaletorch import bisect

torch.manual_seed(0)
x, rank = torch.randn(16, 8).double(), int(os.environ.get("RANK", "-1"))
gate, experts = nn.Linear(8, 4).double(), nn.Bilinear(8, 4, 8, bias=False).double()
if rank >= 0:  # expert i is weight[:, :, i]; a rank has half of its input features
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    experts.weight.data = experts.weight.data.chunk(2, 1)[rank].clone()
    experts.register_forward_hook(
        lambda *y: DTensor.from_local(y[2], mesh, [Partial()]).full_tensor()
    )
with bisect.record(sys.argv[1], nn.ModuleDict({"gate": gate, "experts": experts})) as tape:
    scores = gate(x).softmax(1)
    if rank >= 0:
        parts = [Partial()] if "--mended" in sys.argv else None
        scores = DTensor.from_local(scores, mesh, [Replicate()]).to_local(grad_placements=parts)
    loss = experts(x if rank < 0 else x.chunk(2, 1)[rank], scores).square().mean()
    loss.backward()
    tape.put("loss", loss)

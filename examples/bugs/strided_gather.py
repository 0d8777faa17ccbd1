"""Gloo reads strided tensors as dense: https://github.com/pytorch/pytorch/issues/192920 (2.13)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn.functional import all_gather

from scaletorch import bisect

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
qkv, x = nn.Linear(16, 48).double(), torch.randn(2, 8, 16).double().chunk(ranks, 1)[rank]
positions = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)  # this rank's positions
if ranks > 1:
    dist.init_process_group("gloo")
with bisect.record(sys.argv[1], qkv, describe={"positions": (positions, 8)}) as tape:
    q, k, v = qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    if ranks > 1 and "--mended" in sys.argv:
        k, v = (all_gather_tensor_autograd(t.contiguous(), 2, [0, 1]) for t in (k, v))
    elif ranks > 1:
        k, v = (torch.cat(all_gather(t), 2) for t in (k, v))
    loss = nn.functional.scaled_dot_product_attention(q, k, v).square().mean() / ranks
    loss.backward()
    for tensor in (loss.data, *(p.grad for p in qkv.parameters())) if ranks > 1 else ():
        dist.all_reduce(tensor)
    tape.put("loss", loss)

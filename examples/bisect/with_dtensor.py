"""Tensor parallelism by DTensor; `--sequence` adds sequence parallelism.

`torchrun --nproc-per-node=2 with_dtensor.py runs/dtensor`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small import Decoder, batch, build, loss_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scaletorch import bisect

WHOLE: dict[str, ParallelStyle] = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
WHOLE_LAYER: dict[str, ParallelStyle] = {
    **{f"attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
SHARED: dict[str, ParallelStyle] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
GATHERED = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SHARED_LAYER: dict[str, ParallelStyle] = {
    **WHOLE_LAYER,
    "attn_norm": SequenceParallel(),
    "attn": GATHERED,
    "attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": GATHERED,
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}


def step(folder: str, *, sequence: bool = False) -> Decoder:
    """Train one step of the global batch, recorded."""
    model, mesh = build(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, SHARED if sequence else WHOLE)
    for layer in model.layers:
        parallelize_module(layer, mesh, SHARED_LAYER if sequence else WHOLE_LAYER)
    ids, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bisect.record(folder, model=model) as tape:
        loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        loss.backward()
        tape.put("loss", loss)
        optimizer.step()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    step(sys.argv[1], sequence="--sequence" in sys.argv)
    dist.destroy_process_group()

"""A training script without this library, which the doctor records by itself.

`python -m scaletorch.bisect doctor plain_training.py ddp --nproc 2`. Instead of `ddp` use
`fsdp2`, `tensor`, `pipeline` or `accelerate`; a further word puts a fault into the script.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from small import ROWS, batch, build, loss_sum
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from with_dtensor import SHARED, SHARED_LAYER
from with_pipelining import Stage


def train_pipeline(fault: str) -> None:
    """Train two pipeline stages on micro-batches of one row."""
    part, device = Stage(build(torch.float32), dist.get_rank(), 2), torch.device("cpu")
    stage = PipelineStage(part, dist.get_rank(), 2, device)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.01)
    ids, labels = batch()
    count = (labels != -100).sum()

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_sum(logits, labels) / ((labels != -100).sum() if fault == "mean" else count)

    schedule = Schedule1F1B(stage, ROWS, loss_fn=loss_fn, scale_grads=fault == "mean")
    schedule.step(*[ids] * stage.is_first, target=labels if stage.is_last else None)
    optimizer.step()


def prepared(how: str, fault: str) -> tuple[Any, Any]:
    """Return the parallelized model and its optimizer."""
    model: Any = build(torch.float32)
    if how == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {name: style for name, style in SHARED.items() if (name, fault) != ("norm", "norm")}
        parallelize_module(model, mesh, plan)
        for layer in model.layers:
            parallelize_module(layer, mesh, SHARED_LAYER)
    elif how == "fsdp2":
        for module in (*model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif how == "ddp":
        model = DistributedDataParallel(model)
    if fault == "weights" and dist.get_rank() == 1:
        model.module.head.weight.data[0] *= 1.1
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(how: str, fault: str) -> None:
    """Train one step of two micro-batches on each rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, optimizer = prepared(how if ranks > 1 else "", fault if ranks > 1 else "")
    ids, labels = batch()
    if ranks == 1 and fault == "fixed":
        ids, labels = ids[:2], labels[:2]
    if how == "tensor":
        rank, ranks = 0, 1
    rows = torch.arange(len(ids)).chunk(ranks)[rank]
    for number, own in enumerate(rows.chunk(2)):
        counted = labels[own] if fault == "mean" else labels
        count = (counted != -100).sum() * (ranks * 2 if fault == "mean" else 1) / ranks
        # DDP averages the gradients of ranks.
        with model.no_sync() if fault == "unsummed" and ranks > 1 else nullcontext():
            if not (fault == "dropped" and ranks > 1 and number == 1):
                (loss_sum(model(ids[own]), labels[own]) / count).backward()
    optimizer.step()


def train_accelerate(fault: str) -> None:
    """Train with accelerate, which divides losses by the number of micro-batches."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = build(torch.float32)
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=0.01))
    ids, labels = batch()
    rows = torch.arange(ROWS).chunk(accelerator.num_processes)[accelerator.process_index]
    for own in rows.chunk(2):
        with accelerator.accumulate(model):
            count = (labels != -100).sum() / (2 * accelerator.num_processes)
            if fault == "mean":
                count = (labels[own] != -100).sum()
            accelerator.backward(loss_sum(model(ids[own]), labels[own]) / count)
            optimizer.step()
            optimizer.zero_grad()


def main(how: str = "ddp", fault: str = "") -> None:
    """Train on torchrun's ranks, or in one process."""
    if how == "accelerate":
        return train_accelerate(fault)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    if how == "pipeline" and dist.is_initialized():
        return train_pipeline(fault)
    return train(how, fault)


if __name__ == "__main__":
    main(*sys.argv[1:])

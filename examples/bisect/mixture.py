"""Experts sharded over tensor-parallel ranks by hand.

`python mixture.py runs/one` and `torchrun --nproc-per-node=2 mixture.py runs/tp`. Each rank has
a slice of every expert, so the gradient of the routing scores on a rank is a partial sum.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import HIDDEN, INNER, Decoder, batch, build, loss_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module

from scaletorch import bisect

EXPERTS, TOP = 4, 2


class Experts(nn.Module):
    """Two matrices for each expert; the results are weighted and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Map [B, L, HIDDEN] to the same shape, with weights [B, L, EXPERTS], most of them 0."""
        inner = F.silu(torch.einsum("blh,eih->blei", x, self.up))
        return torch.einsum("blei,ehi,ble->blh", inner, self.down, weights)


class Mixture(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, HIDDEN] to the same shape."""
        scores = self.gate(x)
        kept = scores >= scores.topk(TOP, dim=-1).values[..., -1:]
        out: Tensor = self.experts(x, scores.masked_fill(~kept, float("-inf")).softmax(-1))
        return out


def routed() -> Decoder:
    """Return the small model with experts."""
    model = build()
    for layer in model.layers:
        layer.add_module("mlp", Mixture().double())
    return model


def parallelize(mixture: Mixture, mesh: DeviceMesh) -> None:
    """Shard the experts over the ranks; the router is replicated."""

    def enter(_module: nn.Module, inputs: Any, _mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)

    def leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Tensor:
        local: Tensor = output.to_local(grad_placements=[Partial()])
        return local

    distribute_module(mixture.gate, mesh, None, enter, leave)  # type: ignore[arg-type]
    experts, rank, ranks = mixture.experts, mesh.get_rank(), mesh.size()
    experts.up = nn.Parameter(experts.up.detach().chunk(ranks, 1)[rank].clone())
    experts.down = nn.Parameter(experts.down.detach().chunk(ranks, 2)[rank].clone())

    def summed_in_backward(_module: nn.Module, inputs: Any) -> Any:
        x = DTensor.from_local(inputs[0], mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return x, inputs[1]

    def summed(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        parts = DTensor.from_local(output, mesh, [Partial()])
        whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return whole

    experts.register_forward_pre_hook(summed_in_backward)
    experts.register_forward_hook(summed)


def step(folder: str) -> Decoder:
    """Train one step of the global batch, recorded."""
    model = routed()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in model.modules():
            if isinstance(module, Mixture):
                parallelize(module, mesh)
    ids, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bisect.record(folder, model=model) as tape:
        loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        loss.backward()
        tape.put("loss", loss)
        optimizer.step()
    return model


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    step(sys.argv[1])
    if dist.is_initialized():
        dist.destroy_process_group()

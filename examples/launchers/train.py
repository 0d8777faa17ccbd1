"""A small job that runs the same under every launcher; the scripts in this folder start it.

`torchrun --nproc-per-node=2 train.py`, `srun`, `mpirun -n 2 python train.py`, Ray Train, or
`python train.py` for one process. With `--checkpoint FILE` it resumes from the file, so that
torchrun's `--max-restarts` and a requeued batch job lose at most one step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import scaletorch.dist as dist


def train(steps: int = 20, checkpoint: Path | None = None) -> float:
    """Fit a line to each rank's own data; return the last loss, the same on all ranks."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, loss = 0, torch.zeros(())
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"]
    for step in range(first, steps):
        data = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 4, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        dist.all_reduce_params(gradients, op="mean")
        optimizer.step()
        if checkpoint is not None and dist.is_main_process():
            new = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "step": step + 1}, new)
            new.replace(checkpoint)  # a rank that dies before this line leaves the old file
        dist.barrier()
    loss = loss.detach()
    dist.all_reduce(loss, op="mean")
    return loss.item()


def main() -> None:
    """Parse the command line, join the other ranks, train, and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path)
    arguments = parser.parse_args()
    dist.init_dist(timeout=300)
    loss = train(arguments.steps, arguments.checkpoint)
    if dist.is_main_process():
        print(f"{dist.infer_launcher()}: {dist.get_world_size()} ranks, loss {loss:.4f}")
    dist.cleanup_dist()


if __name__ == "__main__":
    main()

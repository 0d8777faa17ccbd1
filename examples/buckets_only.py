"""Gradient buckets of scaletorch-dp in a plain PyTorch loop, without the other packages.

`pip install scaletorch-dp`, then `python examples/buckets_only.py`: a small byte model learns
a source file of the standard library, in one process and on 2 local ranks, and prints the same
losses twice. Under torchrun, srun or mpirun call `init_dist()` and then `train()`.

Changes to a loop for one device, marked (1) to (5) below:

- (1) The wrapper. Parameter names stay, so checkpoints of the plain module still load.
- (2) Each rank takes its rows of the global batch.
- (3) The loss is a *sum*, divided by the tokens of the whole global batch; gradients are summed.
  If the loss is a mean on each rank, use `DataParallelBucket(model, op="mean")` instead.
- (4) Gradients are reduced with the last micro-batch only.
- (5) The norm is that of the full gradient, bit-identical on every rank.
"""

from __future__ import annotations

import argparse
import inspect
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scaletorch.dist import all_reduce, get_default_group, get_rank, get_world_size, launch
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    clip_grad_norm_,
    global_token_count,
)

CONTEXT, ROWS, MICRO_BATCHES, STEPS = 16, 64, 4, 20


def read_text() -> Tensor:
    """Return text as bytes, [T] int64."""
    source = bytearray(inspect.getsource(argparse).encode())
    return torch.frombuffer(source, dtype=torch.uint8).long()


def global_batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return 16 bytes and the byte after them, [ROWS, CONTEXT] and [ROWS]; spaces are ignored."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (ROWS, 1), generator=generator)
    window = text[starts + torch.arange(CONTEXT + 1)]
    labels = window[:, -1]
    return window[:, :-1], labels.masked_fill(labels == ord(" "), -100)


def micro_batches(text: Tensor, step: int) -> list[tuple[Tensor, Tensor]]:
    """Split this rank's rows of the global batch into micro-batches."""
    inputs, labels = global_batch(text, step)
    mine = slice(get_rank(), None, get_world_size())  # (2)
    parts = inputs[mine].chunk(MICRO_BATCHES), labels[mine].chunk(MICRO_BATCHES)
    return list(zip(*parts, strict=True))


def make_model() -> nn.Module:
    """Return the same plain model on every rank."""
    torch.manual_seed(0)
    embedding = nn.Embedding(256, 16)
    return nn.Sequential(
        embedding, nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    )


def train(dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank; return the global loss of each step, and the weights."""
    text = read_text()
    group = get_default_group()  # any process group; None for one process
    model = DataParallelBucket(make_model().to(dtype), group=group)  # (1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        batches = micro_batches(text, step)
        count = global_token_count([labels for _, labels in batches], group=group)
        total = torch.zeros((), dtype=dtype)
        for index, (inputs, labels) in enumerate(batches):
            is_last = index == MICRO_BATCHES - 1
            with nullcontext() if is_last else model.no_sync():  # (4)
                loss = cross_entropy(model(inputs), labels, reduction="sum") / count  # (3)
                loss.backward()
            total += loss.detach()
        clip_grad_norm_(model, 1.0, group=group)  # (5)
        optimizer.step()
        optimizer.zero_grad()
        all_reduce(total, group=group)  # only for the log
        losses.append(total.item())
    return losses, {name: weight.detach() for name, weight in model.state_dict().items()}


def main() -> None:
    """Train in one process and on two ranks, and compare."""
    alone, _ = train()
    (together, _), _ = launch(train, 2)
    for name, losses in (("one process", alone), ("two ranks", together)):
        print(name, *(f"{loss:.5f}" for loss in losses[:: STEPS - 1]))
    one, two = (torch.tensor(losses, dtype=torch.float64) for losses in (alone, together))
    difference = (one / two - 1).abs().max()  # Python's own max would miss a NaN
    print(f"largest relative difference of {STEPS} losses: {difference:.1e}")


if __name__ == "__main__":
    main()

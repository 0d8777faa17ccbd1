"""A recurrent classifier of series: data parallelism and ZeRO work for any module.

`pip install scaletorch`, then `python examples/recurrent.py`: a convolution and an LSTM learn
the frequency of noisy waves, in one process and on 4 local ranks with sharded optimizer state and
gradients, and print the same losses each time. A batch is a dataclass here; the number of rows
need not be divisible by the number of ranks.
"""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import launch
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import setup_process_group_manager

ROWS, LENGTH, CLASSES, STEPS = 21, 24, 3, 8


class Recurrent(nn.Module):
    """Classifies series by a convolution and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 16, 3, padding=1)
        self.recurrent = nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Map series [B, 1, L] to logits [B, classes]."""
        states, _ = self.recurrent(self.convolution(series).transpose(1, 2))
        logits: Tensor = self.head(states.mean(1))
        return logits


@dataclasses.dataclass
class Batch:
    """Series [B, 1, L] and labels [B]."""

    series: Tensor
    labels: Tensor


def batch(step: int) -> Batch:
    """Return the global batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    waves = ((1 + labels)[:, None] * torch.arange(LENGTH) / 3).sin()
    noise = torch.randn(ROWS, LENGTH, generator=generator) / 5
    return Batch((waves + noise)[:, None].double(), labels)


def loss_fn(output: Tensor, micro_batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of a micro-batch's losses, and their number."""
    return cross_entropy(output, micro_batch["labels"], reduction="sum"), len(output)


def train(sizes: dict[str, int], stage: int = 1) -> list[float]:
    """Return the losses of all steps, the same on every rank."""
    manager = setup_process_group_manager(**sizes)
    torch.manual_seed(0)
    model = parallelize(Recurrent().double(), manager)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model, stage=stage)
    losses = []
    for step in range(STEPS):
        micro_batches = shard_global_batch(batch(step), 2, model=model)
        losses.append(train_step(model, micro_batches, loss_fn=loss_fn).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    print("one process", *(f"{loss:.8f}" for loss in launch(train, 1, {})[0]))
    for stage in (1, 2):
        losses = launch(train, 4, {"dp_size": 4}, stage)[0]
        print("ZeRO", stage, *(f"{loss:.8f}" for loss in losses))

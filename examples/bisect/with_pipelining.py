"""`torch.distributed.pipelining`: stages of the model and a schedule.

`torchrun --nproc-per-node=2 with_pipelining.py runs/pipelining`; append the name of another
schedule, such as `Interleaved1F1B` or `ZBVZeroBubble`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small import ROWS, Decoder, batch, build, loss_sum
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from scaletorch import bisect

STAGES = {"GPipe": [[0], [1]], "1F1B": [[0], [1]], "ZBVZeroBubble": [[0, 3], [1, 2]]}  # by rank


class Stage(nn.Module):
    """The modules of one stage, under their names in the model."""

    def __init__(self, whole: Decoder, stage: int, stages: int) -> None:
        super().__init__()
        own = ["embed", "0", "1", "head"][stage * 4 // stages : (stage + 1) * 4 // stages]
        self.embed = whole.embed if "embed" in own else None
        named = whole.layers.named_children()
        self.layers = nn.ModuleDict({name: layer for name, layer in named if name in own})
        self.norm = whole.norm if "head" in own else None
        self.head = whole.head if "head" in own else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or hidden states to hidden states or logits."""
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def step(
    folder: str,
    schedule: str = "1F1B",
    *,
    mean: bool = False,
    halves: int = 1,
    scaled: bool = False,
) -> list[PipelineStage]:
    """Train one step of the global batch, recorded.

    Args:
        folder: Folder of the recording.
        schedule: Name of the schedule.
        mean: Whether each micro-batch's loss is its own mean, regardless of the others' labels.
        halves: Number of runs of the schedule in the step.
        scaled: Whether each run divides all gradients by the number of micro-batches.
    """
    own = STAGES.get(schedule, [[0, 2], [1, 3]])
    several = sum(map(len, own))
    stages = [
        PipelineStage(Stage(build(), number, several), number, several, torch.device("cpu"))
        for number in own[dist.get_rank()]
    ]
    ids, labels = batch()
    count = (labels != -100).sum()

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_sum(logits, labels) / ((labels != -100).sum() if mean else count)

    scheduled = get_schedule_class(schedule)(
        stages if several > 2 else stages[0],
        ROWS // halves,
        loss_fn=loss_fn,
        scale_grads=mean or scaled,
    )
    optimizer = torch.optim.SGD([p for each in stages for p in each.submod.parameters()], lr=0.1)
    with bisect.record(folder, model=stages):
        for part in range(halves):
            rows = slice(part * ROWS // halves, (part + 1) * ROWS // halves)
            given = [ids[rows]] if stages[0].is_first else []
            scheduled.step(*given, target=labels[rows] if stages[-1].is_last else None)
        optimizer.step()
    return stages


if __name__ == "__main__":
    dist.init_process_group("gloo")
    step(sys.argv[1], *sys.argv[2:])
    dist.destroy_process_group()

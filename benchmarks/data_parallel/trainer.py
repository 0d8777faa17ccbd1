"""A model trained by one way on this rank: its steps and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaletorch.parallel.data_parallel import DataParallelBucket, DataParallelNaive, whole_gradients

from .alternatives import paused
from .models import Batch

OURS = (DataParallelBucket, DataParallelNaive)
Wrap = Callable[[nn.Module, ProcessGroup], nn.Module]
Optimize = Callable[[nn.Module, ProcessGroup], Optimizer]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        wrap: Wraps a model, given its own process group.
        optimize: Makes the wrapped model's optimizer; None if a step ends with backward.
    """

    wrap: Wrap
    optimize: Optimize | None = None


class Trainer:
    """A model trained by one way on this rank."""

    def __init__(self, way: Way, model: nn.Module, group: ProcessGroup) -> None:
        self.module: Any = way.wrap(model, group)
        self.optimizer = way.optimize(self.module, group) if way.optimize else None
        # Ours sums gradients of losses divided by the tokens of all ranks; DDP averages.
        sums = isinstance(self.module, OURS) and self.module.op == "sum"
        self.share = 1 / group.size() if sums else 1.0

    def step(self, batches: list[Batch]) -> None:
        """Zero gradients, compute those of the mean loss of all micro-batches, and update."""
        (self.optimizer or self.module).zero_grad()
        for batch in batches[:-1]:
            with paused(self.module):
                self._loss(batch, len(batches)).backward()
        self._loss(batches[-1], len(batches)).backward()
        if hasattr(self.module, "finish"):
            self.module.finish()
        if self.optimizer:
            self.optimizer.step()

    def steps(self, batches: list[Batch], count: int) -> None:
        """Run `count` steps and wait for their end."""
        for _ in range(count):
            self.step(batches)
        self.settle()

    def _loss(self, batch: Batch, micro_batches: int) -> Tensor:
        loss: Tensor = self.module(*batch)
        return loss * (self.share / micro_batches)

    def settle(self) -> None:
        """Wait for communication that the last step left in flight."""
        if hasattr(self.module, "wait_for_parameters"):
            self.module.wait_for_parameters()

    def gradients(self) -> dict[str, Tensor]:
        """Return full gradients by parameter name."""
        if isinstance(self.module, DataParallelBucket):
            return whole_gradients(self.module)
        model = getattr(self.module, "module", self.module)
        return {
            name: _whole(getattr(each, "main_grad", each.grad))
            for name, each in model.named_parameters()
        }

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters as one tensor; alone, some that start at zero would be noise."""
        self.settle()
        model = getattr(self.module, "module", self.module)
        return {"all": torch.cat([_whole(each.detach()).flatten() for each in model.parameters()])}

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state on this rank."""
        self.settle()
        own = getattr(self.optimizer, "optim", self.optimizer)  # unwrap ZeroRedundancyOptimizer
        states = [value for state in own.state.values() for value in state.values()] if own else []
        tensors = [_local(value) for value in states if isinstance(value, Tensor)]
        return sum(each.numel() * each.element_size() for each in tensors)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

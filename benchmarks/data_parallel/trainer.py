"""A model that one way trains on this rank: a step of it, and what it computed."""

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
    """How to train.

    Attributes:
        wrap: takes a model and a group of its own.
        optimize: makes the wrapped model's optimizer; None where a step ends with backward.
    """

    wrap: Wrap
    optimize: Optimize | None = None


class Trainer:
    """A model that one way trains on this rank."""

    def __init__(self, way: Way, model: nn.Module, group: ProcessGroup) -> None:
        self.module: Any = way.wrap(model, group)
        self.optimizer = way.optimize(self.module, group) if way.optimize else None
        # Ours sums gradients of losses that are divided by the tokens of all ranks; DDP divides.
        sums = isinstance(self.module, OURS) and self.module.op == "sum"
        self.share = 1 / group.size() if sums else 1.0

    def step(self, batches: list[Batch]) -> None:
        """Forget gradients, make those of the mean loss of all micro-batches, and use them."""
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
        """Run so many steps, until nothing of them is under way."""
        for _ in range(count):
            self.step(batches)
        self.settle()

    def _loss(self, batch: Batch, micro_batches: int) -> Tensor:
        loss: Tensor = self.module(*batch)
        return loss * (self.share / micro_batches)

    def settle(self) -> None:
        """Wait for what the last step left under way."""
        if hasattr(self.module, "wait_for_parameters"):
            self.module.wait_for_parameters()

    def gradients(self) -> dict[str, Tensor]:
        """Return whole gradients by the parameters' names in the model."""
        if isinstance(self.module, DataParallelBucket):
            return whole_gradients(self.module)
        model = getattr(self.module, "module", self.module)
        return {
            name: _whole(getattr(each, "main_grad", each.grad))
            for name, each in model.named_parameters()
        }

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters in one, as some begin with zeros that optimizers make noise of."""
        self.settle()
        model = getattr(self.module, "module", self.module)
        return {"all": torch.cat([_whole(each.detach()).flatten() for each in model.parameters()])}

    def state_bytes(self) -> int:
        """Return the size of the optimizer's state on this rank."""
        self.settle()
        own = getattr(self.optimizer, "optim", self.optimizer)  # of ZeroRedundancyOptimizer
        states = [value for state in own.state.values() for value in state.values()] if own else []
        tensors = [_local(value) for value in states if isinstance(value, Tensor)]
        return sum(each.numel() * each.element_size() for each in tensors)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Stages of `torch.distributed.pipelining`, recorded under the names of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Stages(nn.Module):
    """The modules of a rank's stages, each under its name in its stage's module.

    Attributes:
        running: Index of the stage whose forward runs; -1 if none does, e.g. while torch infers the
            shapes that stages exchange.
    """

    def __init__(self, stages: list[Any]) -> None:
        super().__init__()
        self.running, self._stages = -1, sorted(stages, key=lambda each: int(each.stage_index))
        own = [stage.submod for stage in self._stages]
        self._own = [m.module if isinstance(m, DistributedDataParallel) else m for m in own]

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the pipeline."""
        return sorted(dist.get_process_group_ranks(self._stages[0].group or dist.group.WORLD))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all stages."""
        return chain(*(own.named_modules(*args, **kwargs) for own in self._own))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages."""
        return chain(*(own.named_parameters(*args, **kwargs) for own in self._own))

    @contextmanager
    def followed(self, backwarded: Callable[[Tensor], None]) -> Iterator[None]:
        """Track the running stage, and call `backwarded` with the last stage's losses."""

        def forward(stage: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.running = int(stage.stage_index)
            try:
                return original(*args, **kwargs)
            finally:
                self.running = -1

        def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if isinstance(loss := kwargs.get("loss"), Tensor):
                backwarded(loss)
            return original(*args, **kwargs)

        for stage in self._stages:
            stage.forward_one_chunk = partial(forward, stage, stage.forward_one_chunk)
            stage.backward_one_chunk = partial(backward, stage.backward_one_chunk)
        try:
            yield
        finally:
            for stage in self._stages:
                del stage.forward_one_chunk, stage.backward_one_chunk


def stages_of(model: Any) -> Any:
    """Return a module unchanged; for pipeline stages, or a schedule, return `Stages` of all."""
    if isinstance(model, nn.Module):
        return model
    found = getattr(model, "_stages", None) or getattr(model, "_stage", None) or model
    stages = list(found) if isinstance(found, (list, tuple)) else [found]
    return Stages(stages) if all(hasattr(stage, "submod") for stage in stages) else model

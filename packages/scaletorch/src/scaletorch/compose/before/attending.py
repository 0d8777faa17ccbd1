"""Attention that one tp rank alone would refuse, while the others wait for it."""

from __future__ import annotations

import torch
from torch import nn

from ...dist.building import agree
from ...parallel.context_parallel.building import each_alone, looking
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.pipeline_parallel import pipeline_forward
from ..batches import Called
from ..forward import pipeline_of, rehearsing


def require_attention(model: nn.Module, batch: Called, manager: ProcessGroupManager) -> None:
    """Refuse calls of attention on every rank that one of them would refuse.

    Each tp rank has its own heads, so that only one of them may have too few for the cp ranks. A
    forward without attention finds that, in which no cp rank waits for another.

    Args:
        model: What `parallelize` returned.
        batch: A micro-batch, as the model is called with it.
        manager: The grid.

    Raises:
        InvalidArgumentError: This rank would refuse a call.
        MismatchError: Another one would.
    """
    pipeline, failed = pipeline_of(model), list[Exception]()
    try:
        with rehearsing(False), each_alone() as run, looking(pipeline.module):
            pipeline_forward(pipeline, [batch], each=lambda *_: torch.empty(0))
        failed += [] if run.error is None else [run.error]
    except Exception as error:  # the other ranks must learn of it
        failed.append(error)
    # Taken out of the list, since its traceback has this frame.
    agree("attention", [], manager.world_group, error=failed.pop() if failed else None)

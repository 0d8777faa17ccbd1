"""Gradients that are not finite: all ranks hear, whichever of them sum the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..dist import all_gather_object, all_reduce, get_comm_device
from ..dist.errors import NonFiniteError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager, describe_rank


@contextmanager
def refused_together(model: DataParallelBucket, manager: ProcessGroupManager) -> Iterator[None]:
    """Let a step end before gradients are refused that are not finite; then all ranks raise.

    Only the ranks that sum a gradient can see that it is not finite: those of an expert, of a
    stage, of a tp rank. The others would wait for them in the middle of the step.

    Raises:
        NonFiniteError: On every rank, if the model checks gradients and any is not finite.
    """
    if not model.checks_finite:
        yield
        return
    with model.nonfinite_held() as found:
        yield
    told = torch.tensor([len(found)], device=get_comm_device(manager.world_group))
    all_reduce(told, "max", group=manager.world_group)
    if not int(told):
        return
    texts = all_gather_object([str(error) for error in found], manager.world_group)
    model.reset()
    if found:
        raise found[0]
    first = next(text for each in texts for text in each)
    raise NonFiniteError(f"{describe_rank()}: gradients of other ranks are not finite. {first}")

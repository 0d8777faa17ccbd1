"""Let a wrapper's parameters and gradients be float32 for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .wrapper import _DataParallel

NARROW = (torch.float16, torch.bfloat16)


@contextmanager
def widened(wrapper: _DataParallel) -> Iterator[None]:
    """Give 16-bit parameters float32 values for a while, and sum all gradients in float32.

    All gradients are None before and after. Parameters have their own memory back afterwards, so
    that what is written to them meanwhile is lost.

    Args:
        wrapper: `DataParallel` or `DataParallelBucket`, sharded optimizers or not. All ranks widen
            theirs together.
    """
    wrapper.reset()
    narrow = [(each, each.data) for each in wrapper.parameters() if each.dtype in NARROW]
    with ExitStack() as undo:
        undo.callback(_put_back, narrow)  # if memory does not suffice for all
        for parameter, values in narrow:
            parameter.data = values.float()
        for manager in wrapper.bucket_managers:
            undo.enter_context(manager.widened())
        undo.callback(_put_back, narrow)  # for the managers, which then look at them
        undo.callback(wrapper.reset)
        yield


def _put_back(held: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, values in held:
        parameter.data = values

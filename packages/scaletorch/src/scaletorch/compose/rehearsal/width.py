"""A rehearsal in float32 of what runs in 16 bits, where small errors drown in rounding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...dist import get_local_size
from ...parallel.data_parallel import DataParallelBucket
from ...parallel.data_parallel.building import NARROW, widened
from ...parallel.pipeline_parallel.building import PassThrough, forms_cast
from ..forward import pipeline_of
from .quiet import buffers_in, without_autocast

_BYTES = 8  # of each parameter: its value in float32, and its gradient


def is_narrow(x: Any) -> bool:
    """Return whether this is a tensor of 16 bits."""
    return isinstance(x, Tensor) and x.dtype in NARROW


def wish_for_float32(model: DataParallelBucket, device: torch.device) -> tuple[bool, str]:
    """Return whether a model runs in 16 bits, and why it cannot run in float32, if it cannot."""
    narrow = [p for p in model.parameters() if is_narrow(p)]
    travels = any(manager.reduction.dtype in NARROW for manager in model.bucket_managers)
    casts = torch.is_autocast_enabled(device.type)
    fits = _BYTES * sum(p.numel() for p in narrow) <= _free(device) // 2
    plain = all(type(p) is nn.Parameter for p in narrow)  # no class may say what its memory is
    problem = "" if fits else "for which a rank has too little memory"
    if not plain:
        problem = "which the class of its parameters may not be"
    return bool(narrow) or travels or casts, problem


def _free(device: torch.device) -> int:
    """Return how many bytes of a device, or of this rank's share of its host, are free."""
    if device.type == "cpu":
        free: int = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return free // get_local_size()
    module = torch.get_device_module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + kept)


@contextmanager
def in_float32(model: DataParallelBucket, plain: nn.Module) -> Iterator[None]:
    """Let parameters, gradients, buffers and what travels be float32 for a while, without autocast.

    So are the forms of what other stages have, of whose dtype a model's code makes rotations.

    Args:
        model: What `parallelize` returned.
        plain: The plain model, of which the buffers are widened.
    """
    device = next(model.parameters(), torch.empty(0)).detach()
    pipeline = pipeline_of(model)
    passing = [each for each in pipeline.modules() if isinstance(each, PassThrough)]
    passing.extend(pipeline.runtime.chunks.passing())
    with ExitStack() as undo:
        undo.enter_context(widened(model))
        for module in (pipeline.module, plain):
            undo.enter_context(buffers_in(module, torch.float32, NARROW))
        undo.enter_context(forms_cast(passing, lambda x: x.float() if is_narrow(x) else x))
        undo.enter_context(without_autocast(device))
        yield

"""Ways to run a model for a while: in eval mode, or uncompiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; afterwards each module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules as they are written, so that their operations and graphs can be seen.

    The compiler skips for good what it first meets under a dispatch mode; here it meets nothing.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def runs_compiled() -> bool:
    """Return whether compiled code has called what runs, so that it cannot run uncompiled."""
    try:
        with eagerly():
            return False
    except RuntimeError:  # of torch.compiler.set_stance
        return True

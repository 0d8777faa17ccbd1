"""How far a layout's loss curve may lie from one process's before it is no rounding any more.

A step's loss is rounded as everything that `verify` compares: 4 x epsilon x the root of the
additions until then. Training then amplifies that, the more so the higher the learning rate: over
60 steps on two ranks, losses differ by 1 epsilon at the default rate; at three times that rate by
2 until step 30 and by 1,300 at step 41, at ten times by 1 until step 14 and by 23,000 at step 24.
So a step may be off by `GROWTH` times what the one before it may, and none by more than `LARGEST`:
the first 8 steps of float32, and the first 43 of float64, are held to rounding.

bfloat16 is held to `LARGEST` alone. Its sums are float32, so that the additions between two
bfloat16 numbers say nothing of their rounding; counted with its own epsilon they would allow
everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ..compose.summation import chain_length
from ..verify.bounds import bound
from .config import PretrainConfig
from .data import vocabulary_size
from .sizes import plain_model, sizes_of

# The largest relative difference of any step's loss between a layout and one process.
LARGEST = {"float32": 1e-3, "float64": 1e-8, "bfloat16": 2e-2}
GROWTH = 1.25  # by which training may amplify a difference in a step
FAR = 1000  # steps, after which growth is no float any more and `LARGEST` holds long since


def loss_bounds(config: PretrainConfig, steps: Iterable[int]) -> list[float]:
    """Return the largest relative difference of each of some 0-based steps' losses."""
    largest = LARGEST[config.dtype]
    if config.dtype == "bfloat16":
        return [largest for _ in steps]
    dtype: torch.dtype = getattr(torch, config.dtype)
    additions = _additions(config)
    return [
        min(largest, bound(dtype, additions, step) * GROWTH ** min(step, FAR)) for step in steps
    ]


def _additions(config: PretrainConfig) -> int:
    sizes = replace(sizes_of(config), vocab_size=vocabulary_size(config.tokenizer))
    with torch.device("meta"):
        return chain_length(plain_model(sizes), torch.empty(config.batch_size, config.seq_len))

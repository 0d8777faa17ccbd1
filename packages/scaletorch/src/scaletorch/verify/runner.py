"""One case on its ranks, each of which compares what it holds with one process's run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..dist import get_rank
from ..parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from ..parallel.tensor_parallel import load_full_state_dict
from . import dropout
from .cases import Case
from .compare import Difference, compare_named
from .precision import full_precision
from .problem import Subject
from .replicas import own_part
from .routing import REPLAYED
from .training import (
    build,
    compare_dropout,
    divide,
    refusing,
    train_and_compare,
)
from .where import device_of, moved, rank_device

SHOWN = 3  # failures that a rank reports


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank found.

    Attributes:
        compared: How many tensors it compared.
        worst: The one nearest to its bound, or beyond it.
        failures: The first and furthest off that rounding does not explain.
        replayed: Steps in which rounding would have sent a token to other experts than in one
            process.
    """

    compared: int
    worst: Difference
    failures: list[Difference]
    replayed: list[Difference] = field(default_factory=list)


def run_case(case: Case, subject: Subject, reference: str) -> RankReport:
    """Train as one rank of `case` and compare every step with one process's.

    Args:
        case: What to run.
        subject: What to run it with.
        reference: File with the plain checkpoint, the batches and one process's steps.
    """
    grid = case.grid
    device = rank_device(subject.device)
    manager = setup_process_group_manager(grid.tp, grid.cp, grid.pp, grid.dp, grid.ep, grid.etp)
    try:
        saved = moved(load_reference(reference), device)
        with full_precision(subject.device):
            found = list(compare_case(case, subject, saved, manager))
    finally:
        destroy_process_group_manager()
    found = [replace(difference, rank=get_rank()) for difference in found]
    # What went wrong first tells most: a loss before gradients, and the furthest off of these.
    failures = sorted(
        (difference for difference in found if difference.failed),
        key=lambda difference: (difference.step, difference.what != "loss", -difference.severity),
    )
    again = [difference for difference in found if difference.what == REPLAYED]
    found = [difference for difference in found if difference.what != REPLAYED]
    worst = max(found, key=lambda difference: difference.severity)
    return RankReport(len(found), worst, failures[:SHOWN], again)


@functools.lru_cache(maxsize=8)
def load_reference(path: str) -> Mapping[str, Any]:
    """Load the reference of one process. Its tensors are shared, on the CPU: do not change them."""
    saved: Mapping[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return saved


def compare_case(
    case: Case, subject: Subject, saved: Mapping[str, Any], manager: ProcessGroupManager
) -> Iterator[Difference]:
    """Build the model, compare its initial weights, its training and its dropout."""
    device = device_of(saved["batches"][0])
    model = subject.model(case.dtype, device)
    part = own_part(model)
    yield from compare_named("initial weight", 0, model.state_dict(), saved["state"], 0.0, part)
    load_full_state_dict(model, saved["state"])
    with refusing():
        parallel = build(case, model, subject, manager)
        divide(case, subject, saved["batches"][0], parallel)
    dropout.switch(parallel, on=False)
    sound = yield from train_and_compare(case, parallel, manager, saved, subject)
    if sound and saved["dropout"]:
        yield from compare_dropout(case, parallel, manager, saved, subject)

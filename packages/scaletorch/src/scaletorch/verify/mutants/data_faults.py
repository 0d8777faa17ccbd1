"""Faults of data parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .mutant import Catalogue
from .patch import patched

DATA = Catalogue("parallel.data_parallel")
fault = DATA.fault


def _only_flags(all_reduce: Any) -> Any:
    """Leave out the reductions of gradients, which are the asynchronous ones."""
    return lambda *args, **options: None if "async_op" in options else all_reduce(*args, **options)


@fault("bucket:all_reduce", layout="2x1x1x1")
def buckets_not_reduced(all_reduce: Any) -> Any:
    """Gradient buckets miss their all-reduce."""
    return _only_flags(all_reduce)


@fault("bucket:all_reduce", layout="2x1x1x1")
def buckets_reduced_twice(all_reduce: Any) -> Any:
    """Gradient buckets are all-reduced twice."""

    def twice(data: Tensor, op: str, **options: Any) -> Any:
        if "async_op" in options:
            all_reduce(data, op, group=options["group"])
        return all_reduce(data, op, **options)

    return twice


@fault("bucket:Bucket.launch", layout="2x1x1x1")
def unused_parameter_blocks_bucket(launch: Any) -> Any:
    """A bucket that waits for a parameter nobody used is never reduced."""

    def blocked(self: Any, *args: Any) -> None:
        if self.ready:
            launch(self, *args)
            return
        with patched("parallel.data_parallel.bucket:all_reduce", _only_flags):
            launch(self, *args)

    return blocked


@fault("slot:Slot.give", layout="2x1x1x1")
def stale_gradient_after_zero_grad(give: Any) -> Any:
    """The reduced gradient of the step before is added again after zero_grad."""
    kept: dict[str, Tensor] = {}

    def stale(self: Any, reduced: Tensor | None) -> None:
        if reduced is not None:
            reduced = reduced.add(kept.get(self.name, torch.zeros_like(reduced)))
            kept[self.name] = reduced.clone()
        give(self, reduced)

    return stale

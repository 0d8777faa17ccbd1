"""Faults of data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from scaletorch.dist import Work

from .mutant import Catalogue
from .patch import patched

DATA = Catalogue("parallel.data_parallel", "2x1x1x1")
fault = DATA.fault
GRADIENTS = "synchronisation: gradients"


@fault("buckets.bucket:all_reduce_flat", born=GRADIENTS)
def buckets_not_reduced(all_reduce_flat: Any) -> Any:
    """Gradient buckets miss their all-reduce."""
    return lambda data, *_, **__: Work((), lambda: data)


@fault("buckets.bucket:all_reduce_flat", born=GRADIENTS)
def buckets_reduced_twice(all_reduce_flat: Any) -> Any:
    """Gradient buckets are all-reduced twice."""

    def twice(*args: Any, **options: Any) -> Any:
        all_reduce_flat(*args, **options).wait()
        return all_reduce_flat(*args, **options)

    return twice


@fault("buckets.bucket:Bucket.launch", born=GRADIENTS)
def unused_parameter_blocks_bucket(launch: Any) -> Any:
    """A bucket that waits for a parameter nobody used is never reduced."""

    def blocked(self: Any, *args: Any, **options: Any) -> None:
        if self.ready:
            launch(self, *args, **options)
            return
        reduction = "parallel.data_parallel.buckets.bucket:all_reduce_flat"
        with patched(reduction, buckets_not_reduced):
            launch(self, *args, **options)

    return blocked


@fault("buckets.bucket:Slot.give", born=GRADIENTS)
def stale_gradient_after_zero_grad(give: Any) -> Any:
    """The reduced gradient of the step before is added again after zero_grad."""
    kept: dict[str, Tensor] = {}

    def stale(self: Any, reduced: Tensor | None, **options: Any) -> None:
        if reduced is not None:
            reduced = reduced.add(kept.get(self.name, torch.zeros_like(reduced)))
            kept[self.name] = reduced.clone()
        give(self, reduced, **options)

    return stale


@fault("buckets.bucket:Slot.before_accumulation", born=GRADIENTS)
def later_gradients_replace_earlier(before_accumulation: Any) -> Any:
    """A gradient is the last micro-batch's alone."""

    def replacing(self: Any) -> None:
        if self.local:
            self.parameter.grad.zero_()
        before_accumulation(self)

    return replacing


@fault("buckets.bucket:Slot.take", born="synchronisation: rare.shift | spare.*")
def unused_parameter_keeps_old_gradient(take: Any) -> Any:
    """What a rank did not use travels as whatever its memory held."""

    def dirty(self: Any, part: Tensor) -> bool:
        local: bool = take(self, part)
        if not local:
            part.fill_(1)
        return local

    return dirty


@fault("buckets.bucket:reduce_scatter_flat", data_parallel="zero1", born=GRADIENTS)
def shards_of_own_gradients(reduce_scatter_flat: Any) -> Any:
    """Each rank updates its shard with its own gradients alone."""

    def own(data: Tensor, counts: Any, op: str, group: Any, **_: Any) -> Work[Tensor]:
        part = data.split(list(counts))[group.rank()].clone()
        return Work((), lambda: part)

    return own


@fault("buckets.bucket:all_reduce_flat", born=GRADIENTS)
def first_rank_left_out(all_reduce_flat: Any) -> Any:
    """The sum begins with the second rank."""

    def late(data: Tensor, op: str, group: Any, **options: Any) -> Work[Tensor]:
        data.mul_(group.rank() != 0)
        work: Work[Tensor] = all_reduce_flat(data, op, group, **options)
        return work

    return late


@fault("buckets.bucket:all_reduce_flat", layout="4x1x1x1", model="built-in", born=GRADIENTS)
def first_of_four_ranks_left_out(all_reduce_flat: Any) -> Any:
    """The sum of four ranks begins with the second one."""
    return first_rank_left_out(all_reduce_flat)


@fault("buckets.bucket:all_gather_flat", data_parallel="zero1", born="update: weights")
def updated_parameters_not_fetched(all_gather_flat: Any) -> Any:
    """Parameters that other ranks have updated stay as they were."""
    return lambda *_, **__: Work((), lambda: None)


@fault("sharding.shards:ShardedBucket._start", data_parallel="zero2", born=GRADIENTS)
def earlier_micro_batches_forgotten(start: Any) -> Any:
    """Shards keep the gradients of the last micro-batch alone."""

    def forgetful(self: Any, *args: Any) -> Any:
        for shard in self.shards:
            shard.tensor.grad = None
        return start(self, *args)

    return forgetful


@fault("zero:hook_optimizer", data_parallel="zero1", born="update: weights")
def moments_forgotten(follow: Any) -> Any:
    """What a sharded optimizer keeps of a step is gone at the next one."""
    return _before_each_step(follow, lambda optimizer: optimizer.state.clear())


@fault("zero:hook_optimizer", data_parallel="zero2", born="update: weights")
def moments_of_other_elements(follow: Any) -> Any:
    """The moments of a shard lie one element off its parameters."""

    def shift(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = value.roll(1)

    return _before_each_step(follow, shift)


def _before_each_step(follow: Any, change: Callable[[Optimizer], None]) -> Any:
    """Let sharded optimizers change their state before each step."""

    def followed(optimizer: Optimizer, *args: Any, **options: Any) -> None:
        follow(optimizer, *args, **options)
        optimizer.register_step_pre_hook(lambda this, *_: change(this))

    return followed

"""Faults of data parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from scaletorch.dist import Work

from .mutant import Catalogue
from .patch import instead, patched

DATA = Catalogue("parallel.data_parallel", "2x1x1x1")
fault = DATA.fault
GRADIENTS = "synchronisation: gradients"


@fault("buckets.bucket:all_reduce_flat", born=GRADIENTS)
def buckets_not_reduced(all_reduce_flat: Any, data: Any, *_: Any, **__: Any) -> Any:
    """Gradient buckets miss their all-reduce."""
    return Work((), lambda: data)


@fault("buckets.bucket:all_reduce_flat", born=GRADIENTS)
def buckets_reduced_twice(all_reduce_flat: Any, *args: Any, **options: Any) -> Any:
    """Gradient buckets are all-reduced twice."""
    all_reduce_flat(*args, **options).wait()
    return all_reduce_flat(*args, **options)


@fault("buckets.bucket:Bucket.launch", born=GRADIENTS)
def unused_parameter_blocks_bucket(launch: Any, self: Any, *args: Any, **options: Any) -> None:
    """A bucket that waits for a parameter nobody used is never reduced."""
    if self.ready:
        launch(self, *args, **options)
        return
    reduction = "parallel.data_parallel.buckets.bucket:all_reduce_flat"
    with patched(reduction, instead(buckets_not_reduced)):
        launch(self, *args, **options)


@fault("buckets.bucket:Slot.give", born=GRADIENTS)
def stale_gradient_after_zero_grad(
    give: Any, self: Any, reduced: Tensor | None, **options: Any
) -> None:
    """The reduced gradient of the step before is added again after zero_grad."""
    if reduced is not None:
        reduced = reduced + getattr(self.parameter, "stale", 0)
        self.parameter.stale = reduced.clone()
    give(self, reduced, **options)


@fault("buckets.bucket:Slot.before_accumulation", born=GRADIENTS)
def later_gradients_replace_earlier(before_accumulation: Any, self: Any) -> None:
    """A gradient is the last micro-batch's alone."""
    if self.local:
        self.parameter.grad.zero_()
    before_accumulation(self)


@fault("buckets.bucket:Slot.take", born="synchronisation: rare.shift | spare.*")
def unused_parameter_keeps_old_gradient(take: Any, self: Any, part: Tensor) -> bool:
    """What a rank did not use travels as whatever its memory held."""
    local: bool = take(self, part)
    if not local:
        part.fill_(1)
    return local


@fault("buckets.bucket:reduce_scatter_flat", data_parallel="zero1", born=GRADIENTS)
def shards_of_own_gradients(
    reduce_scatter_flat: Any, data: Tensor, counts: Any, op: str, group: Any, **_: Any
) -> Work[Tensor]:
    """Each rank updates its shard with its own gradients alone."""
    part = data.split(list(counts))[group.rank()].clone()
    return Work((), lambda: part)


@fault("buckets.bucket:all_reduce_flat", born=GRADIENTS)
def first_rank_left_out(
    all_reduce_flat: Any, data: Tensor, op: str, group: Any, **options: Any
) -> Work[Tensor]:
    """The sum begins with the second rank."""
    data.mul_(group.rank() != 0)
    work: Work[Tensor] = all_reduce_flat(data, op, group, **options)
    return work


@fault("buckets.bucket:all_reduce_flat", layout="4x1x1x1", model="built-in", born=GRADIENTS)
def first_of_four_ranks_left_out(all_reduce_flat: Any, *args: Any, **options: Any) -> Any:
    """The sum of four ranks begins with the second one."""
    return first_rank_left_out(all_reduce_flat, *args, **options)


@fault("buckets.bucket:all_gather_flat", data_parallel="zero1", born="update: weights")
def updated_parameters_not_fetched(all_gather_flat: Any, *_: Any, **__: Any) -> Any:
    """Parameters that other ranks have updated stay as they were."""
    return Work((), lambda: None)


@fault("sharding.shards:ShardedBucket._start", data_parallel="zero2", born=GRADIENTS)
def earlier_micro_batches_forgotten(start: Any, self: Any, *args: Any) -> Any:
    """Shards keep the gradients of the last micro-batch alone."""
    for shard in self.shards:
        shard.tensor.grad = None
    return start(self, *args)


@fault("zero:hook_optimizer", data_parallel="zero1", born="update: weights")
def moments_forgotten(follow: Any, optimizer: Optimizer, *args: Any, **options: Any) -> None:
    """What a sharded optimizer keeps of a step is gone at the next one."""
    follow(optimizer, *args, **options)
    optimizer.register_step_pre_hook(lambda this, *_: this.state.clear())


@fault("zero:hook_optimizer", data_parallel="zero2", born="update: weights")
def moments_of_other_elements(
    follow: Any, optimizer: Optimizer, *args: Any, **options: Any
) -> None:
    """The moments of a shard lie one element off its parameters."""

    def shift(optimizer: Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = value.roll(1)

    follow(optimizer, *args, **options)
    optimizer.register_step_pre_hook(shift)

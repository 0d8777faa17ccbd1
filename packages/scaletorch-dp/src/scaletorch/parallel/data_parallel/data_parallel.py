"""The wrappers: modules whose gradients are the same on every rank when backward returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...dist.errors import InvalidArgumentError
from .buckets.bucket import Bucket
from .buckets.manager import fill_buckets, one_each
from .buckets.reduction import Reduction, check_floating
from .buckets.slot import Slot
from .sharding.gather import Gathers
from .sharding.shards import Shard
from .wrapper import Settings, _DataParallel


class DataParallelNaive(_DataParallel):
    """Reduces gradients one by one at the end of backward: the wrapper to compare others with.

    It promises the same as `DataParallelBucket`; only speed differs.

    Args:
        module: Any module.
        group: The ranks to reduce over, by default the `cp_dp` axis.
        op: As for `DataParallelBucket`.
        init_sync: As there.

    Raises:
        InvalidArgumentError: An unknown `op` or `init_sync`, or something that is no module.
        MismatchError: As for `DataParallelBucket`.
        StateError: As there.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        op: str = "sum",
        init_sync: str = "check",
    ) -> None:
        settings = Settings(str(op).lower(), init_sync=init_sync)
        super().__init__(module, group, settings, one_each, {}, overlap=False)


class DataParallelBucket(_DataParallel):
    """Reduces gradients in flat buckets, each as soon as backward has filled it.

    When a backward outside `no_sync` returns, `p.grad` is on every rank what it was after the
    synchronisation before plus `op` over the ranks of all that was accumulated since. It stays
    None for parameters that no rank used; a rank that did not use one adds zeros.

    Args:
        module: Any module.
        grad_type: Dtype in which gradients are accumulated and summed over ranks, such as
            `torch.float32` for bfloat16 parameters; None is each parameter's own.
        bucket_size: Most elements in a bucket; a larger parameter has one to itself. The first
            bucket is small, and a model that would fill only a few has smaller ones. They
            are filled in the order in which the first synchronised backward makes the gradients.
        group: The ranks to reduce over, by default the `cp_dp` axis.
        op: `"sum"`, for losses already divided by the global token count, or `"mean"`, which
            divides by the group's size as DistributedDataParallel does.
        reduce_dtype: Dtype in which gradients travel, such as `torch.bfloat16` to send half as
            much; None is the one they are accumulated in.
        order: `"any"`, the backend's, or `"rank"`: the gradient before, plus rank 0's, plus
            rank 1's, and so on. If micro-batch m of a step is rank (m modulo ranks)'s and each is
            synchronised, the bits are those of one process, however many ranks there are.
        init_sync: How parameters and buffers that differ between ranks at the start are treated:
            `"check"` refuses them by name, `"broadcast"` sends the first rank's, `"none"`
            leaves them.
        check_finite: Refuse, on every rank, gradients that are not finite before they are summed,
            with the parameters and the ranks that made them. Costs one more pass over them.
        groups: Parameters that are reduced over other ranks, by name, such as experts over the
            ranks that have the same ones. Each group's ranks have the same parameters of it.

    Raises:
        InvalidArgumentError: An unknown `op`, `order` or `init_sync`, a `grad_type` or
            `reduce_dtype` that is no floating dtype, a `bucket_size` below 1, something that is no
            module, a name in `groups` that is no parameter's, or `groups` with "mean".
        MismatchError: The ranks' parameters differ in name, shape, dtype, order, frozenness or,
            if they are to be compared, values.
        StateError: No group to be found, or a live wrapper has a parameter already.
    """

    def __init__(
        self,
        module: nn.Module,
        grad_type: torch.dtype | None = None,
        bucket_size: int = 2**24,
        group: ProcessGroup | None = None,
        *,
        op: str = "sum",
        reduce_dtype: torch.dtype | None = None,
        order: str = "any",
        init_sync: str = "check",
        check_finite: bool = False,
        groups: Mapping[str, ProcessGroup | None] | None = None,
    ) -> None:
        if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
            message = f"bucket_size must be a number of elements, at least 1, got {bucket_size!r}"
            raise InvalidArgumentError(message)
        check_floating("grad_type", grad_type)
        settings = Settings(
            str(op).lower(), bucket_size, grad_type, reduce_dtype, order, check_finite, init_sync
        )

        def fill(slots: Iterable[Slot], reduction: Reduction) -> list[Bucket]:
            return fill_buckets(slots, bucket_size, grad_type, reduction)

        super().__init__(module, group, settings, fill, groups or {}, overlap=True)
        self.optimizer_shards: list[Shard] | None = None
        self._gathers: list[Gathers] = []

    def _left_by_copies(self) -> dict[str, Any]:
        self.wait_for_parameters()
        return {**super()._left_by_copies(), "optimizer_shards": None, "_gathers": []}

    def use_shards(self, shards: list[Shard], gathers: Gathers) -> None:
        """Note the shards that optimizers update on this rank; `shard_optimizer` calls it."""
        self._sync.attach(self._sync.managers)
        self.optimizer_shards = shards
        others = [each for each in self._gathers if not each.buckets & gathers.buckets]
        self._gathers = [*others, gathers]

    def settle_gradients(self) -> None:
        """Let shards follow all changes of their parameters' gradients since backward.

        Raises:
            StateError: A gradient that lies in shards has not been synchronised.
        """
        for gathers in self._gathers:
            for bucket in gathers.buckets:
                bucket.settle()

    def wait_for_parameters(self) -> None:
        """Wait until all updated parameters are here."""
        for gathers in self._gathers:
            gathers.wait()

"""The wrappers: modules whose gradients are the same on every rank when backward returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...dist.errors import InvalidArgumentError
from .buckets.reduction import check_floating
from .sharding.gather import ParameterGather
from .sharding.shards import Shard
from .wrapper import Settings, _DataParallel


class DataParallelNaive(_DataParallel):
    """Reduces gradients one by one at the end of backward: the baseline for comparisons.

    It gives the results of `DataParallelBucket` at another speed, with the same args and errors.
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
        super().__init__(module, group, settings, {}, overlap=False)


class DataParallelBucket(_DataParallel):
    """Reduces gradients in flat buckets, each as soon as backward has filled it.

    When a backward outside `no_sync` returns, `p.grad` on every rank is its last synchronised value
    plus `op` over the ranks of all gradients accumulated since. It stays None for parameters that
    no rank used; a rank that did not use one adds zeros.

    Args:
        module: Any module.
        grad_type: Dtype in which gradients are accumulated and summed over ranks, such as
            `torch.float32` for bfloat16 parameters; None is each parameter's own.
        bucket_size: Maximum elements in a bucket; a larger parameter has one to itself. The first
            bucket is small, and a model that would fill only a few has smaller ones. They
            are filled in the order of gradients in the first synchronised backward.
        group: The ranks to reduce over, by default the `cp_dp` axis.
        op: `"sum"`, for losses already divided by the global token count, or `"mean"`, which
            divides by the group's size as DistributedDataParallel does.
        reduce_dtype: Dtype of gradients in transit, such as `torch.bfloat16` to send half as
            much; None is the dtype of accumulation.
        init_sync: Treatment of parameters and buffers that differ between ranks at the start:
            `"check"` refuses them by name, `"broadcast"` sends the first rank's, `"none"`
            leaves them.
        check_finite: Refuse, on every rank, gradients that are not finite before they are summed,
            with the parameters and the ranks that made them. Costs one more pass over them.
        groups: Parameters that are reduced over other ranks, by name, such as experts over the
            ranks that hold the same experts. All ranks of a group hold all its parameters.

    Raises:
        InvalidArgumentError: An unknown `op` or `init_sync`, a `grad_type` or
            `reduce_dtype` that is not a floating dtype, a `bucket_size` below 1, an object that is
            not a module, a name in `groups` that is not a parameter's, or `groups` with "mean".
        MismatchError: The ranks' parameters differ in name, shape, dtype, order, frozenness or,
            under "check", values.
        StateError: No group to be found, a live wrapper has a parameter already, or the gradient
            of one goes to its `main_grad`.
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
        init_sync: str = "check",
        check_finite: bool = False,
        groups: Mapping[str, ProcessGroup | None] | None = None,
    ) -> None:
        if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
            message = f"bucket_size must be a number of elements, at least 1, got {bucket_size!r}"
            raise InvalidArgumentError(message)
        check_floating("grad_type", grad_type)
        settings = Settings(
            str(op).lower(), bucket_size, grad_type, reduce_dtype, check_finite, init_sync
        )
        super().__init__(module, group, settings, groups or {}, overlap=True)
        self.optimizer_shards: list[Shard] | None = None
        self._gathers: list[ParameterGather] = []

    def _copy_values(self) -> dict[str, Any]:
        self.wait_for_parameters()
        return {**super()._copy_values(), "optimizer_shards": None, "_gathers": []}

    def use_shards(self, shards: list[Shard], gather: ParameterGather) -> None:
        """Note the shards that optimizers update on this rank; `shard_optimizer` calls it."""
        self._sync.attach(self._sync.managers)
        self.optimizer_shards = shards
        others = [known for known in self._gathers if not known.buckets & gather.buckets]
        self._gathers = [*others, gather]

    def settle_gradients(self) -> None:
        """Copy all changes of parameters' gradients since backward to the shards.

        Raises:
            StateError: A gradient in shards has not been synchronised.
        """
        for gather in self._gathers:
            gather.settle()

    def wait_for_parameters(self) -> None:
        """Wait until all updated parameters have arrived."""
        for gather in self._gathers:
            gather.wait()

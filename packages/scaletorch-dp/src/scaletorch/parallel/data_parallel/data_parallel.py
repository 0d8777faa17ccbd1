"""The wrappers: modules whose gradients are the same on every rank when backward returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...dist.building import FlatBuffers, agree, caught
from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import ModuleWrapper, axis_group
from .buckets.bucket import Bucket
from .buckets.fill import fill_buckets
from .buckets.hooks import GradientSync, refuse_taken
from .buckets.initial import check_init_sync, sync_initial_values
from .buckets.manager import BucketManager
from .buckets.reduction import Reduction, check_floating
from .buckets.slot import Slot
from .parameters import Named, Wrapped, by_group, describe, refuse_lazy
from .sharding.gather import Gathers
from .sharding.shards import Shard


@dataclass(frozen=True, slots=True)
class _Settings:
    """How a wrapper synchronises, as given to `DataParallelBucket`; the same on every rank."""

    op: str
    bucket_size: int | None = None
    grad_type: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    order: str = "any"
    check_finite: bool = False
    init_sync: str = "check"


class _DataParallel(ModuleWrapper):
    """All that both wrappers have in common: not which gradients travel together, and when."""

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        settings: _Settings,
        fill: Callable[[Iterable[Slot], Reduction], list[Bucket]],
        groups: Mapping[str, ProcessGroup | None],
        *,
        overlap: bool,
    ) -> None:
        if not isinstance(module, nn.Module):
            message = f"module must be a torch.nn.Module, got {type(module).__name__}"
            raise InvalidArgumentError(message)
        check_init_sync(settings.init_sync)
        group = axis_group("cp_dp", group)
        parameters = list(module.named_parameters())
        refuse_lazy(parameters)
        parts = by_group(parameters, group, groups)
        if len(parts) > 1 and settings.op == "mean":
            raise InvalidArgumentError(
                "op='mean' would divide by another number for the parameters of other groups: "
                "divide the loss by the global number of tokens, and sum"
            )
        reductions = [
            self._agreed_reduction(module, named, each, settings, overlap=overlap)
            for each, named in parts
        ]
        super().__init__(module)
        self.wrapped = Wrapped(parameters)
        self.groups = dict(groups)
        family: WeakSet[GradientSync] = WeakSet()
        self._syncs = [
            _gradient_sync(module, named, reduction, fill, family, settings, overlap=overlap)
            for (_, named), reduction in zip(parts, reductions, strict=True)
        ]

    def _agreed_reduction(
        self,
        module: nn.Module,
        parameters: Named,
        group: ProcessGroup | None,
        settings: _Settings,
        *,
        overlap: bool,
    ) -> Reduction:
        """Return how gradients are reduced over a group, whose ranks have the same parameters."""
        reduction = Reduction(settings.op, group, settings.reduce_dtype, settings.order)
        if reduction.size == 1:
            return reduction
        named = {"wrapper": type(self).__name__, **asdict(settings)}
        error = caught(refuse_taken, [(n, each) for n, each in parameters if each.requires_grad])
        agree("the model to wrap", describe(parameters, named), group, error=error)
        sync_initial_values([*parameters, *module.named_buffers()], settings.init_sync, group)
        if overlap and settings.reduce_dtype is None:  # else copies of the buffers travel
            return replace(reduction, buffers=FlatBuffers(group))
        return reduction

    @property
    def op(self) -> str:
        """`"sum"` or `"mean"`."""
        return self._syncs[0].manager.reduction.op

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward calls synchronise; its value while backward runs counts."""
        return self._syncs[0].enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for sync in self._syncs:
            sync.enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward calls inside only accumulate on this rank.

        The first synchronised backward after it sends everything. It matters where backward runs,
        not forward. Enter and leave it on all ranks together.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Raises:
            StateError: A parameter requires grad now that was frozen, or not there, when wrapped.
        """
        if torch.is_grad_enabled():
            self.wrapped.refuse_others(self.module)
        for sync in self._syncs:
            sync.begin_forward()
        output = self.module(*args, **kwargs)
        for sync in self._syncs:
            sync.watch(output)
        return output

    def backward(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any) -> Any:
        """Run the wrapped module's own `backward`, a pipeline stage's, and return its result.

        Unlike a plain backward it also lets this rank take part in the synchronisation if none
        of its parameters got a gradient.

        Raises:
            StateError: The wrapped module has no `backward` method.
        """
        stage_backward = getattr(self.module, "backward", None)
        if stage_backward is None:
            message = (
                f"{type(self.module).__name__} has no backward(input_tensor, output_tensor, "
                "output_tensor_grad): that call is for pipeline stages, others use loss.backward()"
            )
            raise StateError(message)
        completed = [sync.completed for sync in self._syncs]
        result = stage_backward(input_tensor, output_tensor, output_tensor_grad)
        for sync, before in zip(self._syncs, completed, strict=True):
            if sync.completed == before:
                sync.finish_if_due()
        return result

    @property
    def bucket_managers(self) -> list[BucketManager]:
        """The buckets of each group, and how they are reduced; the usual group's first."""
        return [sync.manager for sync in self._syncs]

    def reset(self) -> None:
        """Set every gradient to None and forget accumulated ones and whatever is under way.

        Use it in place of `zero_grad` between steps, or after a backward that raised.
        """
        for sync in self._syncs:
            sync.reset()

    def get_bucket_info(self) -> list[dict[str, object]]:
        """Describe the buckets in the order of their reductions.

        Returns:
            For each bucket its `parameters` (names), `elements` (int) and `dtype` (str).
        """
        return [each for manager in self.bucket_managers for each in manager.info()]

    def __getstate__(self) -> NoReturn:
        message = (
            f"{type(self).__name__} cannot be copied or pickled, since its hooks and group would "
            "stay behind: copy or save its .module (or its state_dict()) instead"
        )
        raise StateError(message)


class DataParallelNaive(_DataParallel):
    """Reduces gradients one by one at the end of backward: the wrapper to compare others with.

    It promises the same as `DataParallelBucket`; only speed differs.

    Args:
        module: Any module.
        group: The ranks to reduce over, by default the `cp_dp` axis.
        op: `"sum"`, for losses already divided by the global token count, or `"mean"`, which
            divides by the group's size as DistributedDataParallel does.
        init_sync: As for `DataParallelBucket`.

    Raises:
        InvalidArgumentError: An unknown `op` or `init_sync`, or something that is no module.
        MismatchError: The ranks' parameters differ in name, shape, dtype, order, frozenness or,
            if they are to be compared, values.
        StateError: No group to be found, or a live wrapper has a parameter already.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        op: str = "sum",
        init_sync: str = "check",
    ) -> None:
        settings = _Settings(str(op).lower(), init_sync=init_sync)
        super().__init__(module, group, settings, _one_each, {}, overlap=False)


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
        settings = _Settings(
            str(op).lower(), bucket_size, grad_type, reduce_dtype, order, check_finite, init_sync
        )

        def fill(slots: Iterable[Slot], reduction: Reduction) -> list[Bucket]:
            return fill_buckets(slots, bucket_size, grad_type, reduction)

        super().__init__(module, group, settings, fill, groups or {}, overlap=True)
        self.optimizer_shards: list[Shard] | None = None
        self._gathers: list[Gathers] = []

    def use_shards(self, shards: list[Shard], gathers: Gathers) -> None:
        """Note the shards that optimizers update on this rank; `shard_optimizer` calls it."""
        for sync in self._syncs:
            sync.attach(self.module)
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


def _gradient_sync(
    module: nn.Module,
    parameters: Named,
    reduction: Reduction,
    fill: Callable[[Iterable[Slot], Reduction], list[Bucket]],
    family: WeakSet[GradientSync],
    settings: _Settings,
    *,
    overlap: bool,
) -> GradientSync:
    """Synchronise the trainable ones of these parameters, if there is anything to do."""
    trainable = [(name, each) for name, each in parameters if each.requires_grad]
    slots = [Slot(name, at, each) for at, (name, each) in enumerate(trainable)]
    manager = BucketManager(
        slots, lambda some: fill(some, reduction), reduction, check_finite=settings.check_finite
    )
    sync = GradientSync(manager, overlap, family)
    wider = any(slot.buffer_dtype != slot.parameter.dtype for slot in slots)
    if reduction.size > 1 or wider or settings.check_finite:
        sync.attach(module)
    return sync


def _one_each(slots: Iterable[Slot], reduction: Reduction) -> list[Bucket]:
    """Give every parameter a bucket of its own, in registration order."""
    ordered = sorted(slots, key=lambda slot: slot.index)
    return [Bucket([slot], slot.parameter.dtype, reduction.multiple) for slot in ordered]

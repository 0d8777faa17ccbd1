"""The wrappers: modules whose gradients are the same on every rank when backward returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import broadcast, group_ranks
from ...dist.building import agree, caught, prepare_backward
from ...dist.errors import InvalidArgumentError, NonFiniteError, StateError
from ..pg_manager import ModuleWrapper, axis_group
from ..pg_manager.building import connect_all, digest_text
from .buckets.bucket import Reduction, Slot, check_floating
from .buckets.hooks import GradientSync, WrappedParameters, refuse_taken
from .buckets.manager import BucketManager
from .parameters import Named, describe, group_parameters
from .sharding.gather import ParameterGather
from .sharding.shards import Shard

__all__ = ["DataParallelBucket", "DataParallelNaive"]

INIT_SYNCS = ("check", "broadcast", "none")


class DataParallelBucket(ModuleWrapper):
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

    _overlap = True  # whether buckets leave during backward, or all at its end

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
        op, groups = str(op).lower(), groups or {}
        _check_arguments(module, grad_type, bucket_size, init_sync)
        parameters = list(module.named_parameters())
        by_group = group_parameters(parameters, axis_group("cp_dp", group), groups)
        if len(by_group) > 1 and op == "mean":
            raise InvalidArgumentError(
                "op='mean' would divide by another number for the parameters of other groups: "
                "divide the loss by the global number of tokens, and sum"
            )
        options = {
            "wrapper": type(self).__name__, "op": op, "bucket_size": bucket_size,
            "grad_type": grad_type, "reduce_dtype": reduce_dtype, "check_finite": check_finite,
            "init_sync": init_sync,
        }  # fmt: skip
        managers = []
        for ranks, named in by_group:
            reduction = Reduction(op, ranks, reduce_dtype)
            if reduction.size > 1:
                _agree(module, named, reduction, options)
            trainable = [(name, p) for name, p in named if p.requires_grad]
            slots = [Slot(name, index, p) for index, (name, p) in enumerate(trainable)]
            managers.append(
                BucketManager(slots, reduction, bucket_size, grad_type, check_finite=check_finite)
            )
        super().__init__(module)
        prepare_backward(module.parameters())  # for the matrix products of sharded layers
        self.wrapped = WrappedParameters(parameters)
        self.parameter_groups = dict(groups)
        self.optimizer_shards: list[Shard] | None = None
        self._gathers: list[ParameterGather] = []
        self._sync = GradientSync(managers, overlap=self._overlap)
        self._sync.attach(manager for manager in managers if manager.has_work)

    @property
    def op(self) -> str:
        """`"sum"` or `"mean"`."""
        return self._sync.managers[0].reduction.op

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backward calls synchronise; the value while backward runs counts."""
        return self._sync.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._sync.enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate on this rank in backward calls inside the context.

        The first synchronised backward after it sends everything. It affects backward, not forward.
        Enter and leave it on all ranks together.
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
            StateError: A parameter requires grad now that was frozen, or absent, when wrapped.
        """
        if torch.is_grad_enabled():
            self.wrapped.refuse_others(self.module)
        self._sync.begin_forward()
        output = self.module(*args, **kwargs)
        self._sync.watch(output)
        return output

    def backward(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any) -> Any:
        """Run the `backward` method of the wrapped pipeline stage, and return its result.

        The rank joins the synchronisation even if none of its parameters got a gradient; in a plain
        backward it would not. With ZeRO 2 it sums only the buckets of the wrapped module's
        current parameters: a pipeline has those of one of its stages at a time.

        Raises:
            StateError: The wrapped module has no `backward` method.
        """
        stage_backward = getattr(self.module, "backward", None)
        if stage_backward is None:
            raise StateError(
                f"{type(self.module).__name__} has no backward(input_tensor, output_tensor, "
                "output_tensor_grad): that call is for pipeline stages, others use loss.backward()"
            )
        completed = self._sync.completed
        for manager in self._sync.managers:
            if manager.eager:
                manager.expect(self.module.parameters())
        result = stage_backward(input_tensor, output_tensor, output_tensor_grad)
        if self._sync.completed == completed:
            self._sync.finish_if_due()
        return result

    @property
    def bucket_managers(self) -> list[BucketManager]:
        """The bucket manager of each group; the default group's first."""
        return list(self._sync.managers)

    def reset(self) -> None:
        """Set every gradient to None, and forget accumulated ones and all reductions in flight.

        Use it in place of `zero_grad` between steps, or after a backward that raised.
        """
        self._sync.reset()

    @contextmanager
    def nonfinite_held(self) -> Iterator[list[NonFiniteError]]:
        """Yield a list that collects the errors of `check_finite`, which are not raised meanwhile.

        A backward raises only on the ranks of the parameters' group. Ranks of other experts or
        stages would wait for them: the holder of the errors shares them when the step is over.
        """
        sync, found = self._sync, list[NonFiniteError]()
        sync.held = found
        try:
            yield found
        finally:
            sync.held = None

    @property
    def checks_finite(self) -> bool:
        """True if gradients that are not finite are refused."""
        return self._sync.managers[0].checks_finite

    def get_bucket_info(self) -> list[dict[str, object]]:
        """Describe the buckets in the order of their reductions.

        Returns:
            For each bucket its `parameters` (names), `elements` (int) and `dtype` (str).
        """
        return [
            {"parameters": [s.name for s in b.slots], "elements": b.elements, "dtype": str(b.dtype)}
            for manager in self.bucket_managers
            for b in manager.buckets
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for evaluation, averages or a teacher, without synchronisation."""
        twin: Self = object.__new__(type(self))
        memo[id(self)] = twin
        self.wait_for_parameters()
        new: dict[str, Any] = {"_sync": None, "wrapped": WrappedParameters(None)}
        new |= {"parameter_groups": {}, "optimizer_shards": None, "_gathers": []}
        state = {n: new[n] if n in new else copy.deepcopy(v, memo) for n, v in vars(self).items()}
        vars(twin).update(state)
        idle = [BucketManager([], manager.reduction) for manager in self.bucket_managers]
        twin._sync = GradientSync(idle, overlap=False)
        return twin

    def __getstate__(self) -> NoReturn:
        raise StateError(
            f"{type(self).__name__} cannot be pickled, since its hooks and group would stay "
            "behind: save its state_dict() instead"
        )

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


class DataParallelNaive(DataParallelBucket):
    """Reduces gradients one by one at the end of backward: the baseline for comparisons.

    It gives the results of `DataParallelBucket` at another speed, with the same args and errors.
    """

    _overlap = False

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        op: str = "sum",
        init_sync: str = "check",
    ) -> None:
        super().__init__(module, None, 1, group, op=op, init_sync=init_sync)


def _check_arguments(
    module: object, grad_type: object, bucket_size: object, init_sync: object
) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
        raise InvalidArgumentError(
            f"bucket_size must be a number of elements, at least 1, got {bucket_size!r}"
        )
    check_floating("grad_type", grad_type)
    if init_sync not in INIT_SYNCS:
        known = ", ".join(map(repr, INIT_SYNCS))
        raise InvalidArgumentError(f"init_sync must be one of {known}, got {init_sync!r}")


def _agree(
    module: nn.Module, named: Named, reduction: Reduction, options: Mapping[str, Any]
) -> None:
    """Refuse ranks with other parameters, options or values than this one, and connect them."""
    group, grad_type = reduction.group, options["grad_type"]
    error = caught(refuse_taken, [(n, p) for n, p in named if p.requires_grad])
    agree("the model to wrap", describe(named, options), group, error=error)
    _sync_initial_values([*named, *module.named_buffers()], options["init_sync"], group)
    if any(reduction.folds(grad_type or p.dtype) for _, p in named):
        connect_all(group)


def _sync_initial_values(
    tensors: Sequence[tuple[str, Tensor]], how: str, group: ProcessGroup | None
) -> None:
    """Compare parameters and buffers over the ranks, or broadcast the first rank's, in place."""
    if how == "broadcast":
        source = group_ranks(group)[0]
        for _, tensor in tensors:
            broadcast(tensor.detach(), source, group=group)
    elif how == "check":
        lines = [f"{name} has values {digest_text(tensor)}" for name, tensor in tensors]
        agree("the values to begin with (pass init_sync='broadcast' to send the first rank's)",
              lines, group)  # fmt: skip


NARROW = (torch.float16, torch.bfloat16)


@contextmanager
def widened(wrapper: DataParallelBucket) -> Iterator[None]:
    """Give 16-bit parameters float32 values, and sum all gradients in float32, within a context.

    All gradients are None before and after. Parameters get their own memory back afterwards: values
    written inside the context are lost.

    Args:
        wrapper: A data-parallel wrapper, with sharded optimizers or not. All ranks widen theirs
            together.
    """
    wrapper.reset()
    narrow = [(p, p.data) for p in wrapper.parameters() if p.dtype in NARROW]
    with ExitStack() as undo:
        try:
            for parameter, values in narrow:
                parameter.data = values.float()
            for manager in wrapper.bucket_managers:
                undo.enter_context(manager.widened())
            yield
        finally:  # before the managers read the dtypes again
            wrapper.reset()
            for parameter, values in narrow:
                parameter.data = values

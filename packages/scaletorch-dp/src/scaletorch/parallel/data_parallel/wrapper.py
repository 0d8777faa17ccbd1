"""The common base of both wrappers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import broadcast, group_ranks
from ...dist.building import agree, caught, prepare_backward
from ...dist.errors import InvalidArgumentError, NonFiniteError, StateError
from ..pg_manager import ModuleWrapper, axis_group
from ..pg_manager.building import connect_all, digest_text
from .buckets.hooks import GradientSync, raise_failed, refuse_taken
from .buckets.manager import BucketManager
from .buckets.reduction import Reduction
from .buckets.slot import Slot
from .parameters import Named, WrappedParameters, describe, group_parameters

INIT_SYNCS = ("check", "broadcast", "none")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a wrapper, as of `DataParallelBucket`; the same on every rank."""

    op: str
    bucket_size: int = 1
    grad_type: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    check_finite: bool = False
    init_sync: str = "check"


class _DataParallel(ModuleWrapper):
    """A module whose gradients are the same on every rank when backward returns.

    With `overlap` buckets leave during backward, else all at its end.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        settings: Settings,
        groups: Mapping[str, ProcessGroup | None],
        *,
        overlap: bool,
    ) -> None:
        if not isinstance(module, nn.Module):
            message = f"module must be a torch.nn.Module, got {type(module).__name__}"
            raise InvalidArgumentError(message)
        if settings.init_sync not in INIT_SYNCS:
            known = ", ".join(map(repr, INIT_SYNCS))
            message = f"init_sync must be one of {known}, got {settings.init_sync!r}"
            raise InvalidArgumentError(message)
        group = axis_group("cp_dp", group)
        parameters = list(module.named_parameters())
        by_group = group_parameters(parameters, group, groups)
        if len(by_group) > 1 and settings.op == "mean":
            raise InvalidArgumentError(
                "op='mean' would divide by another number for the parameters of other groups: "
                "divide the loss by the global number of tokens, and sum"
            )
        reductions = [
            self._agreed_reduction(module, named, ranks, settings) for ranks, named in by_group
        ]
        super().__init__(module)
        prepare_backward(module.parameters())  # for the matrix products of sharded layers
        self.wrapped = WrappedParameters(parameters)
        self.parameter_groups = dict(groups)
        managers = [
            _bucket_manager(named, reduction, settings)
            for (_, named), reduction in zip(by_group, reductions, strict=True)
        ]
        self._sync = GradientSync(managers, overlap=overlap)
        self._sync.attach(manager for manager in managers if _has_work(manager))

    def _agreed_reduction(
        self, module: nn.Module, parameters: Named, group: ProcessGroup | None, settings: Settings
    ) -> Reduction:
        """Return the reduction over a group whose ranks have the same parameters."""
        reduction = Reduction(settings.op, group, settings.reduce_dtype)
        if reduction.size == 1:
            return reduction
        named = {"wrapper": type(self).__name__, **asdict(settings)}
        error = caught(refuse_taken, [(n, p) for n, p in parameters if p.requires_grad])
        agree("the model to wrap", describe(parameters, named), group, error=error)
        _sync_initial_values([*parameters, *module.named_buffers()], settings.init_sync, group)
        if any(reduction.folds(settings.grad_type or p.dtype) for _, p in parameters):
            connect_all(group)
        return reduction

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
            message = (
                f"{type(self.module).__name__} has no backward(input_tensor, output_tensor, "
                "output_tensor_grad): that call is for pipeline stages, others use loss.backward()"
            )
            raise StateError(message)
        completed = self._sync.completed
        for manager in self._sync.managers:
            if manager.eager:
                manager.expect(self.module.parameters())
        result = stage_backward(input_tensor, output_tensor, output_tensor_grad)
        if self._sync.completed == completed:
            self._sync.finish_if_due()
        raise_failed([self._sync])
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
        return [info for manager in self.bucket_managers for info in manager.info()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for evaluation, averages or a teacher, without synchronisation."""
        twin: Self = object.__new__(type(self))
        memo[id(self)] = twin
        new = {"_sync": None, "wrapped": WrappedParameters([], copied=True), **self._copy_values()}
        state = {n: new[n] if n in new else copy.deepcopy(v, memo) for n, v in vars(self).items()}
        vars(twin).update(state)
        idle = [BucketManager([], manager.reduction) for manager in self.bucket_managers]
        twin._sync = GradientSync(idle, overlap=False)
        return twin

    def _copy_values(self) -> dict[str, Any]:
        """Return the attributes that have other values in a copy."""
        return {"parameter_groups": {}}

    def __getstate__(self) -> NoReturn:
        message = (
            f"{type(self).__name__} cannot be pickled, since its hooks and group would stay "
            "behind: save its state_dict() instead"
        )
        raise StateError(message)


def _bucket_manager(parameters: Named, reduction: Reduction, settings: Settings) -> BucketManager:
    """Put the trainable parameters into buckets."""
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    slots = [Slot(name, index, parameter) for index, (name, parameter) in enumerate(trainable)]
    size, dtype = settings.bucket_size, settings.grad_type
    return BucketManager(slots, reduction, size, dtype, check_finite=settings.check_finite)


def _has_work(manager: BucketManager) -> bool:
    """Return whether gradients are summed, kept in another dtype, or checked."""
    wider = any(slot.buffer_dtype != slot.parameter.dtype for slot in manager.slots)
    return manager.reduction.size > 1 or wider or manager.checks_finite


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
def widened(wrapper: _DataParallel) -> Iterator[None]:
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
        undo.callback(_restore_values, narrow)  # also if memory does not suffice for all
        for parameter, values in narrow:
            parameter.data = values.float()
        for manager in wrapper.bucket_managers:
            undo.enter_context(manager.widened())
        undo.callback(_restore_values, narrow)  # before the managers read the dtypes again
        undo.callback(wrapper.reset)
        yield


def _restore_values(held: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, values in held:
        parameter.data = values

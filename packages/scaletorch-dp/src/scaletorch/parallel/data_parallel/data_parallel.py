"""The wrappers: modules whose gradients are the same on every rank when backward returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ...dist import get_world_size
from ...dist.agreement import agree
from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import ModuleWrapper, axis_group, describe_rank
from .bucket import Bucket, BucketManager, fill_buckets
from .hooks import GradientSync
from .slot import Slot

_OPS = ("sum", "mean")


class _DataParallel(ModuleWrapper):
    """What both wrappers share: everything but which gradients travel together, and when."""

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        options: dict[str, object],
        fill: Callable[[list[Slot]], list[Bucket]],
        *,
        overlap: bool,
    ) -> None:
        if not isinstance(module, nn.Module):
            message = f"module must be a torch.nn.Module, got {type(module).__name__}"
            raise InvalidArgumentError(message)
        op = str(options["op"]).lower()
        if op not in _OPS:
            message = f"op must be one of {', '.join(map(repr, _OPS))}, got {options['op']!r}"
            raise InvalidArgumentError(message)
        group = axis_group("cp_dp", group)
        alone = group is None or get_world_size(group) == 1
        parameters = list(module.named_parameters())
        if not alone:
            options = {"wrapper": type(self).__name__, **options, "op": op}
            agree("the model to wrap", _describe(parameters, options), group)
        super().__init__(module)
        self._frozen = [(name, each) for name, each in parameters if not each.requires_grad]
        trainable = [(name, each) for name, each in parameters if each.requires_grad]
        slots = [Slot(name, at, each) for at, (name, each) in enumerate(trainable)]
        self._sync = GradientSync(BucketManager(slots, fill(slots), op, group), group, overlap)
        if not alone:
            self._sync.attach()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward calls synchronise; what counts is its value while backward runs."""
        return self._sync.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._sync.enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward calls inside only accumulate on this rank.

        The first synchronised backward after it sends everything. What counts is where backward
        runs, not forward. Enter and leave it on all ranks alike.
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
            StateError: A parameter that was frozen when wrapped requires grad now.
        """
        self._refuse_unfrozen()
        self._sync.begin_forward()
        output = self.module(*args, **kwargs)
        self._sync.watch(output)
        return output

    def backward(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any) -> Any:
        """Run the wrapped module's own ``backward``, a pipeline stage's, and return what it does.

        Unlike a plain backward it also takes this rank's part in the synchronisation where none
        of its parameters got a gradient.

        Raises:
            StateError: The wrapped module has no ``backward`` method.
        """
        stage_backward = getattr(self.module, "backward", None)
        if stage_backward is None:
            message = (
                f"{type(self.module).__name__} has no backward(input_tensor, output_tensor, "
                "output_tensor_grad): that call is for pipeline stages, others use loss.backward()"
            )
            raise StateError(message)
        completed = self._sync.completed
        result = stage_backward(input_tensor, output_tensor, output_tensor_grad)
        if self._sync.completed == completed:
            self._sync.finish_if_due()
        return result

    def reset(self) -> None:
        """Set every gradient to None and forget accumulated ones and whatever is under way.

        Use it in place of ``zero_grad`` between steps, or after a backward that raised.
        """
        self._sync.reset()

    def get_bucket_info(self) -> list[dict[str, object]]:
        """Describe the buckets in the order of their reductions.

        Returns:
            For each bucket its ``parameters`` (names), ``elements`` (int) and ``dtype`` (str).
        """
        return self._sync.manager.info()

    def _refuse_unfrozen(self) -> None:
        names = [name for name, each in self._frozen if each.requires_grad]
        if names:
            message = (
                f"{describe_rank()}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''} "
                "required no grad when the module was wrapped and does now, so its gradient would "
                "not be synchronised: wrap the module after unfreezing it"
            )
            raise StateError(message)

    def __getstate__(self) -> NoReturn:
        message = (
            f"{type(self).__name__} cannot be copied or pickled, since its hooks and group would "
            "stay behind: copy or save its .module (or its state_dict()) instead"
        )
        raise StateError(message)


class DataParallelNaive(_DataParallel):
    """Reduces gradients one by one at the end of backward: the wrapper to compare others with.

    What it promises is what `DataParallelBucket` does; only speed differs.

    Args:
        module: Any module. Its parameters must start equal on all ranks; they are not sent.
        group: The ranks to reduce over, by default the ``cp_dp`` axis.
        op: ``"sum"``, for losses already divided by the global token count, or ``"mean"``, which
            divides by the group's size as DistributedDataParallel does.

    Raises:
        InvalidArgumentError: An unknown ``op``, or something that is no module.
        MismatchError: The ranks' parameters differ in name, shape, dtype, order or frozenness.
        StateError: No group to be found, or a live wrapper has a parameter already.
    """

    def __init__(
        self, module: nn.Module, group: ProcessGroup | None = None, *, op: str = "sum"
    ) -> None:
        super().__init__(module, group, {"op": op}, _one_each, overlap=False)


class DataParallelBucket(_DataParallel):
    """Reduces gradients in flat buckets, each as soon as backward has filled it.

    When a backward outside `no_sync` returns, ``p.grad`` is on every rank what it was after the
    synchronisation before plus ``op`` over the ranks of all that was accumulated since. It stays
    None for parameters that no rank used; a rank that did not use one adds zeros.

    Args:
        module: Any module. Its parameters must start equal on all ranks; they are not sent.
        grad_type: dtype in which gradients travel and are summed over ranks, such as
            ``torch.float32`` for bfloat16 parameters; None is each parameter's own.
        bucket_size: Most elements in a bucket; a larger parameter has one to itself.
        group: The ranks to reduce over, by default the ``cp_dp`` axis.
        op: ``"sum"``, for losses already divided by the global token count, or ``"mean"``, which
            divides by the group's size as DistributedDataParallel does.

    Raises:
        InvalidArgumentError: An unknown ``op``, a ``grad_type`` that is no floating dtype, a
            ``bucket_size`` below 1, or something that is no module.
        MismatchError: The ranks' parameters differ in name, shape, dtype, order or frozenness.
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
    ) -> None:
        if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
            message = f"bucket_size must be a number of elements, at least 1, got {bucket_size!r}"
            raise InvalidArgumentError(message)
        if grad_type is not None and not (
            isinstance(grad_type, torch.dtype) and grad_type.is_floating_point
        ):
            message = f"grad_type must be a floating-point dtype or None, got {grad_type!r}"
            raise InvalidArgumentError(message)

        def fill(slots: list[Slot]) -> list[Bucket]:
            # Backward makes gradients in about the reverse order of registration.
            return fill_buckets(reversed(slots), bucket_size, grad_type)

        options: dict[str, object] = {"op": op, "bucket_size": bucket_size, "grad_type": grad_type}
        super().__init__(module, group, options, fill, overlap=True)


def _one_each(slots: list[Slot]) -> list[Bucket]:
    """Give every parameter a bucket of its own, in registration order."""
    return [Bucket([slot], slot.parameter.dtype) for slot in slots]


def _describe(
    parameters: Iterable[tuple[str, nn.Parameter]], options: Mapping[str, object]
) -> list[str]:
    """Write what ranks must agree on: a line for the options and one for each parameter."""
    lines = [", ".join(f"{name}={value}" for name, value in options.items())]
    for name, parameter in parameters:
        frozen = "" if parameter.requires_grad else " frozen"
        lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}{frozen}")
    return lines

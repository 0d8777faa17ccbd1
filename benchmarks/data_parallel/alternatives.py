"""Ways to make gradients equal on all ranks other than our wrappers and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class FlatAllReduce(nn.Module):
    """Averages all gradients by one all-reduce after backward."""

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.module, self._group = module, group

    def forward(self, *args: Any) -> Any:
        """Call the model."""
        return self.module(*args)

    def finish(self) -> None:
        """Reduce; the gradients become views of the buffer, which saves copying back."""
        parameters = list(self.module.parameters())
        flat = torch.cat([torch.as_tensor(each.grad).flatten() for each in parameters])
        dist.all_reduce(flat.div_(self._group.size()), group=self._group)
        for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
            parameter.grad = view


class MainGradients(nn.Module):
    """Adds each bfloat16 gradient to a float32 one immediately, and averages those after backward.

    Users of mixed precision write this by hand: no overlap, and one copy only. `main_grad` of a
    parameter is its float32 gradient.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.module, self._group = module, group
        parameters = list(module.parameters())
        self._flats = {_key(parameters): torch.zeros(sum(each.numel() for each in parameters))}
        self._point(parameters)
        for each in parameters:
            each.register_post_accumulate_grad_hook(self._take)

    def forward(self, *args: Any) -> Any:
        """Call the model."""
        return self.module(*args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the float32 gradients too."""
        super().zero_grad(set_to_none)
        for flat in self._flats.values():
            flat.zero_()

    def finish(self) -> None:
        """Average over the ranks."""
        for flat in self._flats.values():
            dist.all_reduce(flat.div_(self._group.size()), group=self._group)

    def _point(self, parameters: list[nn.Parameter]) -> None:
        """Make the parameters' main gradients views of their shared buffer."""
        for parameter, view in zip(
            parameters, _views(self._flats[_key(parameters)], parameters), strict=True
        ):
            parameter.main_grad = view  # type: ignore[attr-defined]

    def _take(self, parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


class MainGradientsDDP(MainGradients):
    """`MainGradients` that overlaps averaging with backward, in DDP's buckets.

    DDP itself accumulates and reduces in bfloat16. Here its hook adds a bucket's gradients to the
    float32 ones and reduces those; their buffers match DDP's buckets, so nothing is copied.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__(module, group)
        self._flats = {}  # from now on, one buffer for each DDP bucket
        for each in module.parameters():
            each.main_grad = torch.zeros_like(each, dtype=torch.float32)  # type: ignore[attr-defined]
        self.ddp = DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=True
        )
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def forward(self, *args: Any) -> Any:
        """Call DDP."""
        return self.ddp(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only."""
        return self.ddp.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the float32 gradients too, even before they are views of buckets."""
        nn.Module.zero_grad(self, set_to_none)
        for each in self.module.parameters():
            each.main_grad.zero_()  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Do nothing: the hook has reduced everything."""

    def _take(self, parameter: Any) -> None:
        if not self.ddp.require_backward_grad_sync:
            super()._take(parameter)

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        parameters: list[Any] = bucket.parameters()
        key = _key(parameters)
        if key not in self._flats:  # at the first step, and after DDP rebuilds its buckets
            self._flats[key] = torch.cat([each.main_grad.flatten() for each in parameters])
            self._point(parameters)
        for parameter, grad in zip(parameters, bucket.gradients(), strict=True):
            parameter.main_grad.add_(grad)
        flat = self._flats[key].div_(self._group.size())
        work: Any = dist.all_reduce(flat, group=self._group, async_op=True)
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda _: buffer)
        return future


class AutocastDDP(nn.Module):
    """DDP of float32 parameters with autocast in forward: float32 gradients, and more memory."""

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.ddp = DistributedDataParallel(module.float(), process_group=group)
        self.module = module

    def forward(self, *args: Any) -> Any:
        """Call DDP in autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.ddp(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only."""
        return self.ddp.no_sync()


def fsdp2(model: nn.Module, group: ProcessGroup, *, mixed: bool = False) -> nn.Module:
    """Shard every block and the rest; gather parameters once a step.

    Args:
        model: A model with `blocks`, changed in place.
        group: Process group.
        mixed: Keep float32 shards, compute in bfloat16, and reduce float32 gradients.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    mesh = DeviceMesh.from_group(group, "cpu")
    model = model.float() if mixed else model
    for part in (*model.get_submodule("blocks").children(), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False, **options)
    return model


def paused(module: Any) -> AbstractContextManager[None]:
    """Return a context in which backward only accumulates."""
    if isinstance(module, FSDPModule):
        return _fsdp2_paused(module)
    pause: Callable[[], AbstractContextManager[None]] = getattr(module, "no_sync", nullcontext)
    return pause()


@contextmanager
def _fsdp2_paused(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)  # else every micro-batch would gather again
    yield
    module.set_requires_gradient_sync(True)
    module.set_reshard_after_backward(True)


def _views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return each parameter's view of a flat buffer."""
    parts = flat.split([each.numel() for each in parameters])
    return [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]


def _key(parameters: list[nn.Parameter]) -> tuple[int, ...]:
    return tuple(map(id, parameters))

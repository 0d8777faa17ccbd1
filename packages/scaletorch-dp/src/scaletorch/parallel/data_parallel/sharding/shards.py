"""Shards of parameters, which optimizers update on this rank, and buckets of their gradients.

`ShardedGradient` stands in `parameter.grad` for a gradient that lies in shards over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....dist import Work
from ....dist.building import all_gather_flat, even_counts
from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from ..buckets.bucket import UNUSED, Bucket, Reduction, Slot


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat range of one parameter, and the optimizer's tensor for it.

    Attributes:
        name: The parameter's name in the model.
        parameter: The parameter itself.
        start: First element of the range in `parameter.flatten()`.
        stop: One past the last.
        tensor: The parameter itself, or a float32 (at least) tensor of `stop - start` elements:
            flat, or of the parameter's shape if it is whole. Its `grad` is the gradient.
        replicated: Whether every rank of the data-parallel group has the same range; otherwise its
            elements are on this rank only.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    tensor: Tensor
    replicated: bool

    @property
    def is_master(self) -> bool:
        """True if `tensor` is a master copy, of higher precision than the parameter."""
        return self.tensor.dtype != self.parameter.dtype


def whole_parameter(name: str, parameter: nn.Parameter) -> Shard:
    """Return the shard for a parameter that every rank updates as a whole."""
    return Shard(name, parameter, 0, parameter.numel(), parameter, replicated=True)


def parameter_shards(model: nn.Module) -> list[Shard]:
    """Return the shards that an optimizer of the model updates on this rank, by parameter.

    Args:
        model: A data-parallel wrapper, whose optimizer `shard_optimizer` may have sharded, or any
            module. Frozen parameters are left out; a shared one has its first name.
    """
    found: list[Shard] | None = getattr(model, "optimizer_shards", None)
    if found is not None:
        return list(found)
    return [
        whole_parameter(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def settled_shards(model: nn.Module) -> list[Shard]:
    """Return the shards whose gradients count in the norm on this rank.

    Those are the `parameter_shards`, after all changes of gradients since backward were copied to
    them, and parameters that were frozen with a gradient, as for torch's function.

    Raises:
        InvalidArgumentError: `model` is not a module.
        StateError: A gradient in shards has not been synchronised.
    """
    check_module(model)
    settle = getattr(model, "settle_gradients", None)
    if settle is not None:
        settle()
    shards = parameter_shards(model)
    listed = {id(shard.parameter) for shard in shards}
    return shards + [
        whole_parameter(name, parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and id(parameter) not in listed
        and isinstance(parameter.grad, Tensor)
        and not isinstance(parameter.grad, ShardedGradient)
    ]


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks have shards of some parameter; the same on every rank of the group."""
    return getattr(model, "optimizer_shards", None) is not None


def check_module(model: object) -> None:
    """Refuse anything but a module."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model must be a module, got {type(model).__name__}")


class ShardedGradient(Tensor):
    """A placeholder for a gradient that no rank has whole; it refuses computation.

    It takes no memory. `zero_()` sets the shard of this rank to zero.
    """

    _shard: Tensor | None

    def __new__(cls, parameter: Tensor, shard: Tensor | None) -> ShardedGradient:
        """Stand for a parameter's gradient; `shard` is this rank's optimizer tensor, or None."""
        whole: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        whole._shard = shard
        return whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe it without values."""
        return f"ShardedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Zero the shard, and refuse all other operators."""
        if func in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default):
            for gradient in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                zero(gradient)
            return args[0]
        raise StateError(
            f"{describe_rank()}: {func} of a gradient that lies in shards over the ranks: clip "
            "with clip_grad_norm_ of scaletorch, and see whole_gradients(model) for the whole"
        )


def zero(gradient: Tensor) -> None:
    """Set a gradient, or this rank's shard of it, to zero."""
    if not isinstance(gradient, ShardedGradient):
        gradient.zero_()
    elif gradient._shard is not None and gradient._shard.grad is not None:
        gradient._shard.grad.zero_()


class ShardedBucket(Bucket):
    """A bucket in which each rank gets its shard of the sum, and updates that shard.

    The parameters are moved into one flat tensor, whose shards can be all-gathered. `whole` makes
    shards of whole parameters, for optimizers that need them.
    """

    def __init__(
        self, slots: Sequence[Slot], dtype: torch.dtype, reduction: Reduction, *, whole: bool
    ) -> None:
        super().__init__(slots, dtype, 1 if whole else reduction.size)
        self.reduction, self.whole = reduction, whole
        self.counts = self._whole_counts() if whole else even_counts(self.length, reduction.size)
        start = sum(self.counts[: reduction.rank])
        self.own = slice(start, start + self.counts[reduction.rank])
        self.values = self._move_parameters()
        self._shard_of = dict(self._own_shards())  # by the slot's index
        self.shards = list(self._shard_of.values())
        self._versions = self._current_versions()
        for slot in self.slots:
            self._adopt(slot)

    def open(self) -> int:
        """Follow also changes of the parameters' gradients, which shards do not see."""
        dropped = super().open()
        for slot in self.slots:
            if not (slot.local or isinstance(slot.parameter.grad, ShardedGradient)):
                self._adopt(slot)
        return dropped

    def clear(self) -> None:
        """Forget all gradients, also in shards."""
        super().clear()
        for shard in self.shards:
            shard.tensor.grad = None

    def collect_if_done(self) -> bool:
        """Keep only this rank's shard of the sum, if it has arrived.

        Other ranks may be running other code, so this never waits.
        """
        if self._work is None or self._sent is None:
            return True
        if self._work.is_completed():
            reduced = self._work.wait()
            self._work = Work((), lambda: reduced)
            self._reuse()
        return self._sent is None

    @torch.no_grad()
    def before_step(self) -> None:
        """Follow all changes of parameters and gradients since the last update."""
        for slot, place in self._views(self.values):
            if slot.parameter.numel() and slot.parameter.data_ptr() != place.data_ptr():
                raise StateError(
                    f"{describe_rank()}: {slot.name} has been moved or replaced since its "
                    "optimizer was sharded (by module.to, load_state_dict(assign=True) or .data), "
                    "and would not be updated; copy values into it instead"
                )
        self.settle()
        versions = self._current_versions()
        if versions != self._versions:
            for shard in self.shards:
                if shard.is_master:
                    _update_master(shard)
        self._versions = versions

    def settle(self) -> None:
        """Follow all changes of gradients since the last backward."""
        self.open()
        for slot in self.slots:
            if slot.local:
                raise StateError(
                    f"{describe_rank()}: the gradient of {slot.name} has not been synchronised; "
                    "step only after a backward outside no_sync(), or drop it by zero_grad()"
                )

    @torch.no_grad()
    def _adopt(self, slot: Slot) -> None:
        """Copy a whole gradient that all ranks have, or its absence, to the shards."""
        gradient, shard = slot.parameter.grad, self._shard_of.get(slot.index)
        if shard is not None:
            shard.tensor.grad = None
        if shard is not None and gradient is not None:
            own = gradient.reshape(-1)[shard.start : shard.stop]
            shard.tensor.grad = own.to(shard.tensor.dtype, copy=True).view_as(shard.tensor)
        if gradient is not None:
            self._show_placeholder(slot)

    @torch.no_grad()
    def gather(self) -> Work[Any]:
        """Write this rank's shard into the parameters, and start gathering the others."""
        for shard in self.shards:
            if shard.is_master:
                _flat_range(shard).copy_(shard.tensor.view(-1))
        for slot in self.slots:  # so that autograd sees the change
            torch.autograd.graph.increment_version(slot.parameter)
        self._versions = self._current_versions()
        return self.reduction.gather(self.values, self.counts)

    @torch.no_grad()
    def whole_gradients(self) -> Iterator[tuple[Slot, Tensor]]:
        """Yield every parameter that has a gradient, with its whole gradient."""
        buffer = self.values.new_zeros(self.length, dtype=self._shard_dtype())
        for _, shard, place in self._own_ranges(buffer[self.own]):
            if shard.tensor.grad is not None:
                place.copy_(shard.tensor.grad.view(-1))
        all_gather_flat(buffer, self.counts, self.reduction.group)
        for slot, view in self._views(buffer):
            if slot.parameter.grad is not None:
                yield slot, view

    def _start(self, reduction: Reduction, buffer: Tensor) -> Work[Tensor]:
        return reduction.shard(buffer, self.counts)

    def _give(self, reduced: Tensor, flags: Sequence[int]) -> None:
        reduced = reduced.to(self._shard_dtype())
        # If some shards take no view, views would keep the memory of all alive: copy instead.
        views = all(
            flags[index] != UNUSED and shard.tensor.grad is None
            for index, shard in self._shard_of.items()
        )
        for index, shard, own in self._own_ranges(reduced):
            gradient = own.view(shard.tensor.shape)
            if flags[index] != UNUSED and shard.tensor.grad is not None:
                shard.tensor.grad += gradient
            elif flags[index] != UNUSED:
                shard.tensor.grad = gradient if views else gradient.clone()
        for slot in self.slots:
            if flags[slot.index] == UNUSED:
                slot.give(None)
            else:
                self._show_placeholder(slot)

    def _show_placeholder(self, slot: Slot) -> None:
        shard = self._shard_of.get(slot.index)
        tensor = None if shard is None else shard.tensor
        slot.set_placeholder(ShardedGradient(slot.parameter, tensor))

    def _shard_dtype(self) -> torch.dtype:
        return self.shards[0].tensor.dtype if self.shards else _master_dtype(self.values.dtype)

    def _own_ranges(self, own: Tensor) -> Iterator[tuple[int, Shard, Tensor]]:
        """Yield the index of a slot, its shard on this rank, and its range of `own`."""
        for index, shard in self._shard_of.items():
            start = self._places[index] + shard.start - self.own.start
            yield index, shard, own[start : start + shard.stop - shard.start]

    def _own_shards(self) -> Iterator[tuple[int, Shard]]:
        for slot in self.slots:
            first = self._places[slot.index]
            start = max(self.own.start - first, 0)
            stop = min(self.own.stop - first, slot.parameter.numel())
            if start < stop:
                values = slot.parameter.detach().view(-1)[start:stop]
                values = values.view(slot.parameter.shape) if self.whole else values
                tensor = nn.Parameter(values.to(_master_dtype(values.dtype)))
                shard = Shard(slot.name, slot.parameter, start, stop, tensor, replicated=False)
                yield slot.index, shard

    def _whole_counts(self) -> list[int]:
        """Give each rank the whole parameters whose middle lies in its even share."""
        counts = [0] * self.reduction.size
        for slot in self.slots:
            elements = slot.parameter.numel()
            middle = self._places[slot.index] + elements / 2
            counts[int(middle * self.reduction.size / max(self.length, 1))] += elements
        return counts

    @torch.no_grad()
    def _move_parameters(self) -> Tensor:
        first = self.slots[0].parameter
        values = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        for slot, view in self._views(values):
            view.copy_(slot.parameter)
            slot.parameter.data = view
        return values

    def _current_versions(self) -> list[int]:
        return [slot.parameter._version for slot in self.slots]


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _update_master(shard: Shard) -> None:
    """Copy values that were written into a parameter to its master, if they differ."""
    values, master = _flat_range(shard), shard.tensor.view(-1)
    master.copy_(torch.where(values != master.to(values.dtype), values.to(master.dtype), master))


def _flat_range(shard: Shard) -> Tensor:
    return shard.parameter.detach().view(-1)[shard.start : shard.stop]

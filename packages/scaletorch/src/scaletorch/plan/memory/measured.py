"""What a rank really holds, to be put beside what a plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ...parallel.data_parallel import DataParallelBucket, parameter_shards
from ..estimate import Memory


class Kept(saved_tensors_hooks):
    """The most bytes that autograd keeps at a time; each memory counts once, parameters do not.

    Args:
        model: Whose parameters are no activations.

    Attributes:
        most: Bytes.

    Example:
        >>> kept = Kept(model)
        >>> with kept:
        ...     train_step(model, micro_batches)
        >>> kept.most
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, lambda held: held.tensor)
        self.most = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._users = Counter[int]()
        self._now = 0

    def _pack(self, tensor: Tensor) -> Any:
        return _Held(tensor, self)

    def change(self, at: int, size: int, users: int) -> None:
        """Count so many more users of memory."""
        if at not in self._parameters:
            before, after = self._users[at], self._users[at] + users
            self._users[at] = after
            self._now += size * ((after > 0) - (before > 0))
            self.most = max(self.most, self._now)


class _Held:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor, self._kept = tensor, kept
        storage = tensor.untyped_storage()
        self._memory = storage.data_ptr(), storage.nbytes()
        kept.change(*self._memory, 1)

    def __del__(self) -> None:
        self._kept.change(*self._memory, -1)


def held(model: DataParallelBucket, optimizer: Optimizer, activations: int = 0) -> Memory:
    """Return what this rank holds, by the memory of the tensors themselves.

    Args:
        model: What `parallelize` returned, after a backward.
        optimizer: After a step.
        activations: What `Kept` counted.
    """
    gradients = [shard.tensor.grad for shard in parameter_shards(model)]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Memory(_storage(model.parameters()), _storage(gradients), _storage(states), activations)


def _storage(tensors: Iterable[Any]) -> int:
    """Return the bytes of the memory under some tensors."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

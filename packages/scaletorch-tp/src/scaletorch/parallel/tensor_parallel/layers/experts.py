"""Experts whose stacked weights are divided over the ranks along the width inside of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ....dist import get_world_size
from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..cuts.cut import Cut, require_shares
from ..cuts.stacked import Stacked
from ..regions.region import in_region
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded, own_class, surround
from ..regions.uncompiled import around_compiled, copy, reduce, uncompiled
from .base import Group, Options, TensorParallelLayer

# What names of attributes that hold the width of experts contain.
_OF_WIDTH = ("intermediate", "ffn", "expert_dim")


class ParallelExperts(TensorParallelLayer, Surrounded):
    """A module of stacked expert weights, before whose own class this comes.

    Hidden states and the router's weights enter, so the gradients of both are summed over the
    ranks; results leave as a sum. With sequence parallelism the tokens of all ranks are gathered
    at the entrance, each with its indices and weights, and every rank gets its tokens' results.
    """

    plain_class = nn.Module
    sharded_size = "width"
    shard_dims: ClassVar[Mapping[str, int]] = {}  # each module has its own
    options: ClassVar[dict[str, Any]] = {"stacked": None}

    stacked: Stacked

    @classmethod
    def convert(cls, module: nn.Module, *where: Any, **options: Any) -> Self:
        """Turn a module itself into this rank's shard: see the base; it says its width here."""
        layer = super().convert(module, *where, **options)
        if layer.tp_size > 1:
            _set_widths(layer, layer.cut.whole, layer.shard_sizes[layer.tp_rank])
        return layer

    @classmethod
    def _taken(
        cls, module: nn.Module, group: Group, cut: Cut | None, options: Options
    ) -> tuple[Any, int]:
        """Return a module, which stays an instance of its class, and its experts' width."""
        stacked: Stacked = options["stacked"]
        cls._refuse(stacked.misfit(module))
        width = stacked.width(module)
        require_shares(f"{cls.__name__}: {cls.sharded_size}", width, get_world_size(group))
        vars(module)["shard_dims"] = stacked.dims
        return surround(module, cls, group), width

    @property
    def settled(self) -> Collection[str]:
        """Names of the shards, and of what one rank adds: each computes its whole gradient."""
        return {*self.shard_dims, *self.stacked.added}

    def cut_of(self, name: str) -> Cut:
        """Return how a parameter is cut along its dim."""
        return self.stacked.sharded[name].cut(self.cut)

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on this rank's share of the width; return whole results."""
        if self.tp_size == 1:
            return super().forward(*args, **kwargs)
        sequence = self.sequence
        sizes = None if sequence is None else self._rows(sequence, args, kwargs)
        leading = _leading(args, kwargs)
        args = tuple(self._enter(each, sizes) for each in args)
        kwargs = {name: self._enter(each, sizes) for name, each in kwargs.items()}
        own = self._parameters
        # Hooks and names stay on the parameters; only this call sees what they became.
        vars(self)["_parameters"] = own | self._added()
        try:
            with in_region():
                results = super().forward(*args, **kwargs)
        finally:
            vars(self)["_parameters"] = own
        if not isinstance(results, Tensor):
            raise InvalidArgumentError(
                f"{describe_rank()}: {own_class(self).__name__} must return the experts' results, "
                f"a tensor of which ranks have parts, and returned a {type(results).__name__}"
            )
        if self.sequence is None or sizes is None:
            return reduce(results, self.group)
        return self.sequence.leave_rows(results.flatten(0, -2), sizes).unflatten(0, leading)

    def _enter(self, x: Any, sizes: tuple[int, ...] | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self.sequence is not None and sizes is not None:
            entered = self.sequence.enter_rows(x.flatten(0, -2), sizes)
            return entered if x.ndim == 2 else entered[None]  # as one sequence
        return copy(x, self.group) if x.is_floating_point() else x

    @uncompiled
    def _rows(
        self,
        sequence: SequenceShares,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Return how many rows of tokens each rank has."""
        given = [*tensors_in((args, kwargs))]
        rows = [x.flatten(0, -2) if x.dim() in (2, 3) else x for x in given]
        hidden = rows[0] if rows else torch.empty(())
        alone = len(given) == 1 and given[0].ndim == 2  # rows for each expert, as Llama 4 has
        if hidden.dim() != 2 or alone or any(x.shape[:1] != hidden.shape[:1] for x in rows):
            shapes = ", ".join(str(tuple(x.shape)) for x in given) or "none"
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {own_class(self).__name__} must be "
                "called with rows, a token each, as hidden states [T, H] or [B, L, H], indices "
                f"[T, K] and weights [T, K], got {shapes}; do without sequence parallelism"
            )
        return sequence.rows(hidden)

    def _added(self) -> dict[str, Any]:
        """Return what is to be added once, as this rank adds it."""
        function: Any = AddedElsewhere
        added = {name: self._parameters[name] for name in self.stacked.added}
        return {n: function.apply(p) for n, p in added.items()} if self.tp_rank else added

    def extra_repr(self) -> str:
        """Describe the division."""
        return f"width={self.cut.whole}, tp={self.tp_size}"


def _leading(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dims before the last one of the first tensor, the hidden states."""
    return next((tuple(x.shape[:-1]) for x in tensors_in((args, kwargs))), ())


class AddedElsewhere(Function):
    """Zeros in place of what the first rank adds; backward gives it the gradient that it has there.

    Every rank sees the gradient of the whole result, so each computes the whole of this one.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        """Return zeros like `whole`."""
        return torch.zeros_like(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient as it is."""
        return grads[0]


def _set_widths(module: nn.Module, whole: int, own: int) -> None:
    """Set the attributes that hold the width to this rank's share of it."""
    for name, value in vars(module).items():
        if type(value) is int and value == whole and any(part in name for part in _OF_WIDTH):
            vars(module)[name] = own

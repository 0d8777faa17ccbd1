"""Experts whose stacked weights are divided over the ranks along the width inside of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Invariant, Partial, Replicate, Shard, convert
from ..cuts.styles import Stacked
from ..regions.region import in_region
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import own_class
from .heads import OwnParameters

# What names of attributes that hold the width of experts contain.
_OF_WIDTH = ("intermediate", "ffn", "expert_dim")


class ParallelExperts(OwnParameters):
    """A module of stacked expert weights, before whose own class this comes.

    Hidden states and the router's weights enter, so the gradients of both are summed over the
    ranks; results leave as a sum. With sequence parallelism the tokens of all ranks are gathered
    at the entrance, each with its indices and weights, and every rank gets its tokens' results.
    """

    sharded_size = "width"

    own_style: Stacked

    @classmethod
    def convert(cls, module: nn.Module, *where: Any, **options: Any) -> Self:
        """Turn a module itself into this rank's shard: see the base; it says its width here."""
        layer = super().convert(module, *where, **options)
        if layer.tp_size > 1:
            _set_widths(layer, layer.cut.whole, layer.shard_sizes[layer.tp_rank])
        return layer

    @property
    def settled(self) -> Collection[str]:
        """Names of the shards, and of what one rank adds: each computes its whole gradient."""
        return {*self.shard_dims, *self.own_style.added}

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on this rank's share of the width; return whole results."""
        if self.tp_size == 1:
            return super().forward(*args, **kwargs)
        sequence = self.sequence
        sizes = None if sequence is None else self._rows(sequence, args, kwargs)
        leading = next((x.shape[:-1] for x in tensors_in((args, kwargs))), ())  # of hidden states
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
        if sizes is None:
            return convert(results, Partial(), Invariant(), self.group)
        rows = convert(results.flatten(0, -2), Partial(), Shard(0, sizes), self.group)
        return rows.unflatten(0, leading)

    def _enter(self, x: Any, sizes: tuple[int, ...] | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        if sizes is not None:  # all ranks' rows, one rank's behind another's
            entered = convert(x.flatten(0, -2), Shard(0, sizes), Replicate(), self.group)
            return entered if x.ndim == 2 else entered[None]  # as one sequence
        # Indices have no gradient to be summed.
        enters = x.is_floating_point()
        return convert(x, Invariant(), Replicate(), self.group) if enters else x

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
        """Return what is to be added once, as this rank adds it: zeros on ranks but the first.

        Every rank sees the gradient of the whole result, so each computes the whole of theirs.
        """
        added = {name: self.get_parameter(name) for name in self.own_style.added}
        return {n: p - p.detach() for n, p in added.items()} if self.tp_rank else {**added}

    def extra_repr(self) -> str:
        """Describe the division."""
        return f"width={self.cut.whole}, tp={self.tp_size}"


def _set_widths(module: nn.Module, whole: int, own: int) -> None:
    """Set the attributes that hold the width to this rank's share of it."""
    for name, value in vars(module).items():
        if type(value) is int and value == whole and any(part in name for part in _OF_WIDTH):
            vars(module)[name] = own

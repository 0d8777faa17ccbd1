"""Modules that keep their class and forward but whose own parameters are sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Cut, Invariant, Partial, Replicate, Shard, convert
from ..regions.region import in_region
from ..regions.sequence_shares import SequenceShares
from ..regions.surround import Surrounded, own_class, surround
from ..styles import PerHead, Stacked
from .base import Group, Options, TensorParallelLayer

_SET = ("group", "tp_size", "tp_rank", "cut", "shard_sizes", "shard_dims")  # by `convert`


class OwnParameters(TensorParallelLayer, Surrounded):
    """Mixin put before a module's own class; the style defines its parameters' shards."""

    plain_class = nn.Module
    shard_dims: ClassVar[Mapping[str, int]] = {}  # each module has its own
    options: ClassVar[dict[str, Any]] = {"own_style": None}

    own_style: PerHead | Stacked

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become one with any style, or None if it can."""
        return None

    @classmethod
    def _taken(
        cls, module: nn.Module, group: Group, options: Options, *, even: bool
    ) -> tuple[Any, int]:
        """Add this mixin to a module's class; return the module and the divided length."""
        style: PerHead | Stacked = options["own_style"]
        cls._refuse(style.misfit(module))
        length = style.length(module)
        cls._require_shares(length, group)
        vars(module)["shard_dims"] = style.dims
        return surround(module, cls, group), length

    def cut_of(self, name: str) -> Cut:
        """Return the cut of the parameter `name` along its shard dim."""
        return self.own_style.cut_of(name, self.cut)


class HeadParameters(OwnParameters):
    """An attention module with per-head parameters; its projections have styles of their own."""

    sharded_size = "heads"

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return the name collision that prevents `module` from becoming one, or None."""
        bases = type(module).__mro__
        names = {name for kind in bases[: bases.index(nn.Module)] for name in vars(kind)}
        names |= {*vars(module), *module._modules, *module._buffers}
        wanted = {*_SET, *vars(TensorParallelLayer)} - {*vars(nn.Module)}
        taken = sorted(name for name in names & wanted if not name.startswith("__"))
        if taken:
            return f"it has a {taken[0]!r} of its own, a name that a shard needs: rename it"
        return None


# Substrings of the names of attributes that hold the width of experts.
_OF_WIDTH = ("intermediate", "ffn", "expert_dim")


class ParallelExperts(OwnParameters):
    """Mixin put before the class of a module of stacked expert weights.

    Under sequence parallelism the tokens of all ranks are all-gathered with their routing, and
    outputs are reduce-scattered back to the tokens' ranks.
    """

    sharded_size = "width"

    own_style: Stacked

    @classmethod
    def convert(cls, module: nn.Module, *where: Any, **options: Any) -> Self:
        """Convert a module in place, as the base does, and set its width to this rank's."""
        layer = super().convert(module, *where, **options)
        for name, value in vars(module).items() if layer.tp_size > 1 else ():
            is_width = any(part in name for part in _OF_WIDTH)
            if is_width and type(value) is int and value == layer.cut.whole:
                vars(module)[name] = layer.shard_sizes[layer.tp_rank]
        return layer

    @property
    def settled(self) -> Collection[str]:
        """Names of the shards and of the `added` biases, whose gradient is full on each rank."""
        return {*self.shard_dims, *self.own_style.added}

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on this rank's slice of the width; return summed outputs."""
        if self.tp_size == 1:
            return super().forward(*args, **kwargs)
        sequence = self.sequence
        sizes = None if sequence is None else self._rows(sequence, args, kwargs)
        leading = next((x.shape[:-1] for x in tensors_in((args, kwargs))), ())  # of hidden states
        args = tuple(self._enter(each, sizes) for each in args)
        kwargs = {name: self._enter(each, sizes) for name, each in kwargs.items()}
        parameters = self._parameters
        # Replace parameters for this call only, so that their hooks and names stay.
        vars(self)["_parameters"] = parameters | self._added()
        try:
            with in_region():
                results = super().forward(*args, **kwargs)
        finally:
            vars(self)["_parameters"] = parameters
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
        if sizes is not None:  # the rows of all ranks, concatenated
            entered = convert(x.flatten(0, -2), Shard(0, sizes), Replicate(), self.group)
            return entered if x.ndim == 2 else entered[None]  # [1, rows, H]
        # Integer indices have no gradient.
        enters = x.is_floating_point()
        return convert(x, Invariant(), Replicate(), self.group) if enters else x

    @uncompiled
    def _rows(
        self,
        sequence: SequenceShares,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Return the number of token rows on each rank."""
        tensors = [*tensors_in((args, kwargs))]
        rows = [x.flatten(0, -2) if x.dim() in (2, 3) else x for x in tensors]
        hidden = rows[0] if rows else torch.empty(())
        alone = len(tensors) == 1 and tensors[0].ndim == 2  # rows grouped by expert, as in Llama 4
        if hidden.dim() != 2 or alone or any(x.shape[:1] != hidden.shape[:1] for x in rows):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "none"
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {own_class(self).__name__} must be "
                "called with rows, a token each, as hidden states [T, H] or [B, L, H], indices "
                f"[T, K] and weights [T, K], got {shapes}; do without sequence parallelism"
            )
        return sequence.rows(hidden)

    def _added(self) -> dict[str, Any]:
        """Return the `added` biases of the first rank, and zeros with gradients on other ranks."""
        added = {name: self.get_parameter(name) for name in self.own_style.added}
        return {n: p - p.detach() for n, p in added.items()} if self.tp_rank else {**added}

    def extra_repr(self) -> str:
        """Return the full width and tp."""
        return f"width={self.cut.whole}, tp={self.tp_size}"

"""Modules that keep their class and forward but whose own parameters are sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Boundary, Cut, Partial, Replicate, Shard, Varying, convert, ends
from ..regions.random import sharded_random
from ..regions.sequence_shares import SequenceShares, change_arguments
from ..regions.surround import Surrounded, own_class, surround
from ..styles import Sliced
from .base import Group, Memo, TensorParallelLayer
from .linear import row_options

PLACED = "placed"  # a node's metadata: places of its tensor and their placements by boundaries
# Substrings of the names of attributes that hold the width of experts.
_OF_WIDTH = ("intermediate", "ffn", "expert_dim")


class OwnParameters(TensorParallelLayer, Surrounded):
    """Mixin put before a module's own class; the style defines its parameters' shards."""

    plain_class = nn.Module

    own_style: Sliced  # each module has `shard_dims` of its own by it

    @classmethod
    def convert(cls, module: nn.Module, group: Group, memo: Memo, cut: Cut, **options: Any) -> Self:
        """Add this mixin to the class of a module, which fits, and shard its parameters."""
        vars(module)["shard_dims"] = options["own_style"].dims
        layer: Any = surround(module, cls, group)
        layer._shard(group, memo, options, cut)
        return layer  # type: ignore[no-any-return]

    def cut_of(self, name: str) -> Cut:
        """Return the cut of the parameter `name` along its shard dim."""
        return self.own_style.cut_of(name, self.cut)

    @property
    def settled(self) -> Collection[str]:
        """Names of the shards and of the `added` terms, whose gradient is full on each rank."""
        return {*self.shard_dims, *self.own_style.added}

    @contextmanager
    @around_compiled
    def _terms(self) -> Iterator[None]:
        """Replace the `added` parameters for one call: zeros with gradients but on one rank."""
        parameters, names = self._parameters, self.own_style.added
        added: dict[str, Any] = {name: self.get_parameter(name) for name in names}
        if self.tp_rank:
            added = {name: p - p.detach() for name, p in added.items()}
        vars(self)["_parameters"] = parameters | added
        try:
            yield
        finally:
            vars(self)["_parameters"] = parameters

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return the name collision that prevents `module` from becoming one, or None."""
        bases = type(module).__mro__
        names = {name for kind in bases[: bases.index(nn.Module)] for name in vars(kind)}
        names |= {*vars(module), *module._modules, *module._buffers}
        wanted = {*vars(TensorParallelLayer), *TensorParallelLayer.__annotations__}
        wanted -= vars(nn.Module).keys()
        taken = sorted(name for name in names & wanted if not name.startswith("__"))
        if taken:
            return f"it has a {taken[0]!r} of its own, a name that a shard needs: rename it"
        return None


class HeadParameters(OwnParameters):
    """An attention module with per-head parameters; its projections have styles of their own."""

    sharded_size = "heads"


class AtBoundary(Surrounded):
    """Mixin of a module with a `Boundary`: converts its floating-point inputs and outputs."""

    _boundary: Boundary
    _where: str  # its name and axis, in messages

    @classmethod
    def settings(cls, boundary: Boundary, name: str) -> dict[str, Any]:
        """Return the attributes of a module that gets this mixin."""
        boundary.require_conversions(where := f"'{name}' on tp")
        return {"_boundary": boundary, "_where": where}

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on converted inputs, and convert its outputs."""
        inputs = self._boundary.inputs
        if isinstance(inputs, Mapping):
            args, kwargs = change_arguments(self, self._named, args, kwargs)
            varies = any(isinstance(ends(side)[1], Shard | Varying) for side in inputs.values())
        else:
            args, kwargs = self._convert(inputs, "the input", (args, kwargs))
            varies = isinstance(ends(inputs)[1], Shard | Varying)
        own_stream = varies and self.training
        with sharded_random(self._tp_group) if own_stream else nullcontext():
            out = super().forward(*args, **kwargs)
        outputs = self._boundary.outputs
        return out if outputs is None else self._convert(outputs, "the output", out)

    def _named(self, name: str, x: Any) -> Any:
        inputs: Any = self._boundary.inputs
        return self._convert(inputs[name], f"the input {name!r}", x) if name in inputs else x

    @uncompiled
    def _convert(self, side: Any, place: str, value: Any) -> Any:
        src, dst = ends(side)

        def change(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            where = f"{place} of {self._where}"
            y = convert(x, src, dst, self._tp_group, where=where)
            nodes: Any = x.grad_fn, y.grad_fn
            for placement, node in zip((src, dst), nodes, strict=True):
                if node is not None:
                    node.metadata.setdefault(PLACED, {})[where, placement] = None
            return y

        return map_tensors(change, value)


class Bounded(AtBoundary, OwnParameters):
    """A module with a `Boundary` whose own parameters are sharded."""

    sharded_size = "shards"

    @classmethod
    def misfit(cls, module: nn.Module) -> str | None:
        """Return why `module` cannot become one, or None if it can."""
        return row_options(module) or super().misfit(module)

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on shards of its parameters."""
        if self.tp_size == 1:
            return super(AtBoundary, self).forward(*args, **kwargs)
        with self._terms():
            return super().forward(*args, **kwargs)


class ParallelExperts(Bounded):
    """Mixin put before the class of a module of stacked expert weights.

    With sequence parallelism it gathers all ranks' tokens and routing, and scatters the outputs.
    """

    sharded_size = "width"

    @classmethod
    def convert(cls, module: nn.Module, *where: Any, **options: Any) -> Self:
        """Convert a module in place, as the base does, and set its width to this rank's."""
        layer = super().convert(module, *where, **options)
        for name, value in vars(module).items():
            is_width = any(text in name for text in _OF_WIDTH)
            if is_width and type(value) is int and value == layer.cut.whole:
                vars(module)[name] = layer.shard_sizes[layer.tp_rank]
        return layer

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on this rank's slice of the width; return summed outputs."""
        if self.sequence is None:
            return super().forward(*args, **kwargs)
        sizes = self._rows(self.sequence, args, kwargs)
        leading = next(x.shape[:-1] for x in tensors_in((args, kwargs)))  # of hidden states

        def gathered(x: Tensor) -> Tensor:
            rows = convert(x.flatten(0, -2), Shard(0, sizes), Replicate(), self.group)
            return rows if x.ndim == 2 else rows[None]  # [1, rows, H]

        args, kwargs = map_tensors(gathered, (args, kwargs))
        with self._terms():
            results = super(AtBoundary, self).forward(*args, **kwargs)
        rows = convert(results.flatten(0, -2), Partial(), Shard(0, sizes), self.group)
        return rows.unflatten(0, leading)

    @uncompiled
    def _rows(
        self, sequence: SequenceShares, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the number of token rows on each rank."""
        tensors = [*tensors_in((args, kwargs))]
        rows = [x.flatten(0, -2) if x.dim() in (2, 3) else x for x in tensors]
        hidden = rows[0] if rows else torch.empty(())
        alone = len(tensors) == 1 and tensors[0].ndim == 2  # rows grouped by expert, as in Llama 4
        sizes = sequence.sizes_of(sequence.length or self.tp_size)
        own = hidden.shape[:1]
        odd = not own or own[0] % sizes[self.tp_rank]  # not all tokens of this rank's sequences
        if hidden.dim() != 2 or alone or odd or any(x.shape[:1] != own for x in rows):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "none"
            raise InvalidArgumentError(
                f"{describe_rank()}: with sequence parallelism {own_class(self).__name__} must be "
                "called with rows, a token each, as hidden states [T, H] or [B, L, H], indices "
                f"[T, K] and weights [T, K], got {shapes}; do without sequence parallelism"
            )
        return tuple(own[0] // sizes[self.tp_rank] * size for size in sizes)

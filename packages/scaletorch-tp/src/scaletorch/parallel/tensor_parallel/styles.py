"""Styles with arguments: packed projections, per-head parameters, stacked experts, attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ..placement import Boundary, Cut, Invariant, Partial, Replicate, Shard, ends, fuse

FUSABLE = ("column", "column_gather", "row")


@dataclass(frozen=True, slots=True)
class Fused:
    """A style for a linear layer that packs several projections into one weight.

    Each projection is sharded over the ranks, and a rank's weight holds its shard of every one, in
    order. So the model's own `split` or `chunk` of the output still works. For projections that are
    interleaved head by head (GPT-NeoX), use plain "column", which cuts at head boundaries.

    Args:
        style: "column", "column_gather" or "row".
        projections: Length of each one in the full weight, or the number of equal ones.

    Raises:
        InvalidArgumentError: The style cannot be fused, or a length is not positive.

    Example:
        >>> plan = {"**.qkv": Fused("column", (512, 128, 128)), "**.gate_up": Fused("column", 2)}
    """

    style: str
    projections: int | tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.projections
        lengths = (given,) if isinstance(given, int) else given
        positive = all(type(n) is int and n > 0 for n in lengths)
        if self.style not in FUSABLE or not lengths or not positive:
            raise InvalidArgumentError(
                f"Fused takes one of {', '.join(map(repr, FUSABLE))}, and a number of equal "
                f"projections or the length of each, got {self.style!r} and {given!r}"
            )

    def misfit(self, length: int) -> str | None:
        """Return why a length cannot be split into these projections, or None if it can."""
        lengths = self.lengths(length)
        wrong = f"its projections {lengths} add up to {sum(lengths)} features, but it has {length}"
        return None if sum(lengths) == length else wrong

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the length of each projection, for a `length` that fits."""
        if isinstance(self.projections, int):
            return (length // self.projections,) * self.projections
        return tuple(self.projections)


@dataclass(frozen=True, slots=True, init=False)
class PerHead:
    """A style for an attention module with its own parameters [heads, ...], such as sinks.

    They are sharded like its query heads, so its projections must be sharded too. They may have
    several elements for each head, [heads * length, ...], such as a scale of every feature. In an
    MLP they have one element for each output feature of its column-parallel layers.

    Args:
        names: All parameters that the module itself owns.

    Example:
        >>> plan = {"**.self_attn": PerHead("sinks"), "**.self_attn.q_proj": "column"}
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module does not fit this style, or None if it does."""
        found = {name: p for name, p in module._parameters.items() if p is not None}
        if not found or found.keys() != {*self.names}:
            return f"its own parameters are {', '.join(found) or 'none'}"
        shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
        if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
            return f"its parameters have the shapes {shapes}; dim 0 of each must be the heads"
        return misfit_of(module, found)


@dataclass(frozen=True, slots=True)
class Slices:
    """The layout of one divided length, such as the experts' width, in one parameter.

    Args:
        dim: The dim of the parameter whose length is `packed` * `unit` * the divided length.
        packed: Number of equal matrices along `dim`: 2 for [gate | up] in one weight. A rank
            gets its shard of each.
        unit: Number of adjacent features for one index of the divided length: 2 for interleaved
            gate and up.
    """

    dim: int
    packed: int = 1
    unit: int = 1

    def cut(self, length: Cut) -> Cut:
        """Return the cut of `dim`, given the cut of the divided length."""
        return fuse([length.times(self.unit)] * self.packed)


@dataclass(frozen=True, slots=True)
class Sliced:
    """Shards of a module's own parameters, all along one divided length."""

    sharded: Mapping[str, Slices]
    added: tuple[str, ...] = ()  # replicated parameters that only the first rank adds to a sum

    @classmethod
    def at(cls, boundary: Boundary, module: nn.Module) -> Sliced:
        """Return the shards of a module that fits its boundary."""
        dims = {n: d % module.get_parameter(n).ndim for n, d in boundary.dims.items()}
        lengths = {n: module.get_parameter(n).shape[d] for n, d in dims.items()}
        common = math.gcd(*lengths.values()) or 1
        slices = {n: Slices(dim, unit=lengths[n] // common or 1) for n, dim in dims.items()}
        return cls(slices, boundary.terms)

    @property
    def dims(self) -> dict[str, int]:
        """The shard dim of each parameter."""
        return {name: slices.dim for name, slices in self.sharded.items()}

    def length(self, module: nn.Module) -> int:
        """Return the divided length of a module that fits."""
        name, slices = next(iter(self.sharded.items()))
        return int(module.get_parameter(name).shape[slices.dim]) // (slices.packed * slices.unit)

    def cut_of(self, name: str, length: Cut) -> Cut:
        """Return the cut of a parameter, given the cut of the divided length."""
        return self.sharded[name].cut(length)


@dataclass(frozen=True, slots=True, init=False)
class Stacked(Sliced):
    """A style for a module of stacked expert weights, called with tokens and their routing.

    It is called as `experts(hidden, top_k_index, top_k_weights)`, [T, H], [T, K] and [T, K]. Every
    rank holds all experts, each sharded along its width (intermediate size). The module's own
    forward runs on the shards, and its outputs are summed over the ranks.

    Args:
        sharded: Parameter -> the `Slices` of its experts' width, or only the dim.
        added: Parameters added after the last matrix product: output biases. They are replicated,
            but only the first rank adds them.

    Raises:
        InvalidArgumentError: No parameter is sharded, or one along dim 0, that of the experts, or
            `packed` or `unit` is not positive.

    Example:
        >>> plan = {"**.experts": Stacked({"gate_up_proj": Slices(1, packed=2), "down_proj": 2})}
    """

    def __init__(self, sharded: Mapping[str, Slices | int], added: tuple[str, ...] = ()) -> None:
        slices = {n: Slices(s) if isinstance(s, int) else s for n, s in sharded.items()}
        if not slices or any(min(s.dim, s.packed, s.unit) < 1 for s in slices.values()):
            raise InvalidArgumentError(
                "Stacked takes the names of parameters and a dim of each behind that of the "
                f"experts, and packed matrices and a unit of at least 1, got {sharded}"
            )
        object.__setattr__(self, "sharded", slices)
        object.__setattr__(self, "added", tuple(added))

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module does not fit this style, or None if it does."""
        found = dict(module.named_parameters(remove_duplicate=False))
        lacking = [name for name in (*self.sharded, *self.added) if name not in module._parameters]
        if lacking:
            return f"it has no parameter {', '.join(lacking)}, but {', '.join(found) or 'none'}"
        unnamed = [name for name in found if name not in (*self.sharded, *self.added)]
        if unnamed:
            return (
                f"{', '.join(unnamed)} would work on this rank's shard of the experts' width or "
                "of their results, and is neither sharded nor added"
            )
        widths = set()
        for name, slices in self.sharded.items():
            shape, packed = tuple(found[name].shape), slices.packed * slices.unit
            if slices.dim >= len(shape) or shape[slices.dim] % packed:
                return f"its {name} {shape} has no dim {slices.dim} of {packed} equal lengths"
            widths.add(shape[slices.dim] // packed)
        if len(widths) > 1:
            return f"its parameters have the widths {sorted(widths)}; only one can be sharded"
        return misfit_of(module, found)


def misfit_at(boundary: Boundary, module: nn.Module) -> str | None:
    """Return why a module with known parameters does not fit a boundary, or None if it does."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    unnamed = [name for name in found if name not in boundary.parameters]
    if unnamed and boundary.outputs is not None and isinstance(ends(boundary.outputs)[0], Partial):
        return (
            "it computes Partial() outputs, and its boundary has no placement of "
            f"{', '.join(unnamed)}: Shard(dim), Partial() if it is added to the outputs, or "
            "Replicate()"
        )
    return misfit_of(module, {name: found[name] for name in boundary.parameters})


def unknown_parameters(module: nn.Module, boundary: Boundary) -> str | None:
    """Return which parameters of a boundary a module does not have, or None."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    for name, placement in boundary.parameters.items():
        if name not in found:
            return f"it has no parameter {name}, but {', '.join(found) or 'none'}"
        ndim = found[name].ndim
        if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
            return f"its {name} {tuple(found[name].shape)} has no dim {placement.dim}"
        if placement in (Invariant(), Replicate(), Partial()):
            continue
        if not isinstance(placement, Shard) or placement.sizes is not None:
            return f"its {name} cannot be {placement}; a parameter is Shard(dim) of equal shards"
    return None


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A style for a replicated linear layer whose last output features are shared by all heads.

    The gradient of these features is summed over the ranks. The other features enter a
    column-parallel layer.

    Args:
        features: Number of shared features.

    Example:
        >>> plan = {"**.kv_a_proj_with_mqa": SharedTail(64), "**.kv_b_proj": "column"}
    """

    features: int

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module does not fit this style, or None if it does."""
        out = getattr(module, "out_features", None)
        if isinstance(out, int) and 0 < self.features < out:
            return None
        return f"it has {out} output features, of which {self.features} cannot be a shared tail"


@dataclass(frozen=True, slots=True, init=False)
class Divide:
    """A style that divides integer attributes of a module by tp, such as its head counts.

    Args:
        attributes: Names of the module's own integer attributes.
    """

    attributes: tuple[str, ...]

    def __init__(self, *attributes: str) -> None:
        object.__setattr__(self, "attributes", attributes)


def misfit_of(module: nn.Module, parameters: Mapping[str, Tensor]) -> str | None:
    """Return why a module's parameters of any shape cannot be sharded, or None if they can."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}, not an nn.Parameter"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"its {name} has gradient hooks: shard a model before it is wrapped"
    return None

"""Styles that say how parameters are cut: packed parts, parameters of heads, stacks of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ...placement import Cut, fuse

FUSABLE = ("column", "column_gather", "row")


@dataclass(frozen=True, slots=True)
class Fused:
    """A style for a linear layer whose divided features are several parts in one weight.

    Each part is cut over the ranks, and a rank's weight holds its share of every part in their
    order; so the model's own `split` or `chunk` of the output still finds them. Parts that are
    interleaved head by head (GPT-NeoX) are cut at head borders by plain "column".

    Args:
        style: "column", "column_gather" or "row".
        parts: Length of each part in the whole, or a number of equal parts.

    Raises:
        InvalidArgumentError: The style has no parts, or a length is not positive.

    Example:
        >>> plan = {"**.qkv": Fused("column", (512, 128, 128)), "**.gate_up": Fused("column", 2)}
    """

    style: str
    parts: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if self.style not in FUSABLE:
            styles = ", ".join(map(repr, FUSABLE))
            raise InvalidArgumentError(f"Fused takes one of {styles}, got {self.style!r}")
        lengths = (self.parts,) if isinstance(self.parts, int) else tuple(self.parts)
        if not lengths or not all(type(n) is int and n > 0 for n in lengths):
            raise InvalidArgumentError(
                f"Fused takes a number of equal parts or the length of each, got {self.parts!r}"
            )
        if not isinstance(self.parts, int):
            object.__setattr__(self, "parts", lengths)

    def misfit(self, length: int) -> str | None:
        """Return why a length does not consist of these parts, or None if it does."""
        if isinstance(self.parts, int):
            uneven = length % self.parts
            return f"its {length} features are not {self.parts} equal parts" if uneven else None
        total = sum(self.parts)
        if total == length:
            return None
        return f"its parts add up to {total} features, but it has {length}"

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the length of each part of `length`, which consists of them."""
        if isinstance(self.parts, int):
            return (length // self.parts,) * self.parts
        return self.parts


@dataclass(frozen=True, slots=True, init=False)
class PerHead:
    """A style for attention that has parameters [heads, ...] of its own, such as sinks.

    They are cut as its query heads are, so the module must be one whose projections are sharded.
    They may have several elements of each head, [heads * length, ...], such as scales of all
    features; in an MLP they have one for each feature of its column-parallel layers.

    Args:
        names: The module's own parameters; it has no others.

    Raises:
        InvalidArgumentError: None is named.

    Example:
        >>> plan = {"**.self_attn": PerHead("sinks"), "**.self_attn.q_proj": "column"}
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise InvalidArgumentError(f"PerHead takes names of parameters, got {names}")
        object.__setattr__(self, "names", names)

    def __str__(self) -> str:
        """Return what tables show."""
        return "per head"

    @property
    def dims(self) -> dict[str, int]:
        """The dim along which each parameter is cut."""
        return dict.fromkeys(self.names, 0)

    def length(self, module: nn.Module) -> int:
        """Return how many heads, or features, the parameters of a module that fits are for."""
        return int(module.get_parameter(self.names[0]).shape[0])

    def cut_of(self, name: str, heads: Cut) -> Cut:
        """Return how a parameter is cut if the heads are cut so."""
        return heads

    def misfit(self, module: nn.Module) -> str | None:
        """Return why the parameters of a module cannot be cut so, or None if they can."""
        return next(self._misfits(module), None)

    def _misfits(self, module: nn.Module) -> Iterator[str]:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if own.keys() != {*self.names}:
            yield f"its own parameters are {', '.join(own) or 'none'}"
            return
        yield from misfits(module, own)
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
            yield f"its parameters are of the shapes {shapes}, where each has a dim 0 of all heads"


@dataclass(frozen=True, slots=True)
class Slices:
    """The place of the experts' width in one stacked parameter.

    Args:
        dim: The dim of the stack that is as long as `parts` times `unit` times the width.
        parts: How many equal parts follow one another there: 2 for gate and up in one weight, of
            each of which a rank has its share.
        unit: How many features of one index follow one another: 2 for interleaved gate and up.

    Raises:
        InvalidArgumentError: `dim` is that of the experts, or a number is not positive.
    """

    dim: int
    parts: int = 1
    unit: int = 1

    def __post_init__(self) -> None:
        if any(type(n) is not int or n < 1 for n in (self.dim, self.parts, self.unit)):
            raise InvalidArgumentError(
                f"Slices takes a dim behind that of the experts, a number of parts and a unit, "
                f"each at least 1, got {(self.dim, self.parts, self.unit)}"
            )

    def cut(self, width: Cut) -> Cut:
        """Return how the dim is cut if the width is cut so."""
        return fuse([width.times(self.unit)] * self.parts)


@dataclass(frozen=True, slots=True, init=False)
class Stacked:
    """A style for a module of stacked expert weights that is called with tokens and their routing.

    It is called as `experts(hidden, top_k_index, top_k_weights)`, [T, H], [T, K] and [T, K]. Every
    rank keeps all experts, and of the width inside of each its share; the module's own forward
    computes on these, and its results are summed over the ranks.

    Args:
        sharded: Parameter -> its `Slices`, or the dim alone.
        added: Parameters that are added behind the last product: biases of the output. They are
            whole on every rank, and are added by the first one alone.

    Raises:
        InvalidArgumentError: Nothing is sharded.

    Example:
        >>> plan = {"**.experts": Stacked({"gate_up_proj": Slices(1, parts=2), "down_proj": 2})}
    """

    sharded: Mapping[str, Slices]
    added: tuple[str, ...]

    def __init__(self, sharded: Mapping[str, Slices | int], added: tuple[str, ...] = ()) -> None:
        if not sharded:
            raise InvalidArgumentError("Stacked takes the names of parameters and their dims")
        slices = {n: Slices(s) if isinstance(s, int) else s for n, s in sharded.items()}
        object.__setattr__(self, "sharded", slices)
        object.__setattr__(self, "added", tuple(added))

    def __str__(self) -> str:
        """Return what tables show."""
        return "stacked experts"

    @property
    def dims(self) -> dict[str, int]:
        """The dim along which each parameter is cut."""
        return {name: slices.dim for name, slices in self.sharded.items()}

    def length(self, module: nn.Module) -> int:
        """Return the width inside of each of a module's experts, which fit this style."""
        name, slices = next(iter(self.sharded.items()))
        return int(module.get_parameter(name).shape[slices.dim]) // (slices.parts * slices.unit)

    def cut_of(self, name: str, width: Cut) -> Cut:
        """Return how a parameter is cut if the width is cut so."""
        return self.sharded[name].cut(width)

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module cannot be cut so, or None if it can."""
        return next(self._misfits(module), None)

    def _misfits(self, module: nn.Module) -> Iterator[str]:
        own = dict(module.named_parameters(remove_duplicate=False))
        lacking = [name for name in (*self.sharded, *self.added) if name not in module._parameters]
        if lacking:
            yield f"it has no parameter {', '.join(lacking)}, but {', '.join(own) or 'none'}"
            return
        unnamed = [name for name in own if name not in (*self.sharded, *self.added)]
        if unnamed:
            yield (
                f"{', '.join(unnamed)} would see this rank's part of the experts' width or of "
                "their results, and is neither sharded nor added"
            )
        yield from misfits(module, own)
        widths = set()
        for name, slices in self.sharded.items():
            shape, packed = tuple(own[name].shape), slices.parts * slices.unit
            if slices.dim >= len(shape) or shape[slices.dim] % packed:
                yield f"its {name} {shape} has no dim {slices.dim} of {packed} equal parts"
                return
            widths.add(shape[slices.dim] // packed)
        if len(widths) > 1:
            yield f"its parameters are of the widths {sorted(widths)}, where one is cut"


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A style for a layer that stays whole, of whose output each head uses the last features.

    The gradient of these is summed over the ranks; the others enter a column-parallel layer.

    Args:
        features: How many.

    Raises:
        InvalidArgumentError: It is not a positive number.

    Example:
        >>> plan = {"**.kv_a_proj_with_mqa": SharedTail(64), "**.kv_b_proj": "column"}
    """

    features: int

    def __post_init__(self) -> None:
        if type(self.features) is not int or self.features < 1:
            raise InvalidArgumentError(
                f"SharedTail takes a number of features, at least 1, got {self.features!r}"
            )

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module has no such tail, or None if it has."""
        out = getattr(module, "out_features", None)
        if not isinstance(out, int) or out <= self.features:
            return f"it has no more than {self.features} output features ({out})"
        return None


def misfits(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield why parameters of a module cannot be cut, whatever their names and shapes are."""
    if "forward" in vars(module):
        yield "its forward was replaced on the instance"
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            yield f"its {name} is a {type(parameter).__name__}, not an nn.Parameter"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"its {name} has gradient hooks: shard a model before it is wrapped"

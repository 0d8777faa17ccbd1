"""Stacked weights of experts, [experts, ...]: the width inside of each is cut over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ....dist.errors import InvalidArgumentError
from .cut import Cut
from .fused import fuse


@dataclass(frozen=True, slots=True)
class Slices:
    """Where the width of experts lies in one stacked parameter.

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

    def width(self, module: nn.Module) -> int:
        """Return the width inside of each of a module's experts, which fit this style."""
        name, slices = next(iter(self.sharded.items()))
        return int(module.get_parameter(name).shape[slices.dim]) // (slices.parts * slices.unit)

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module cannot be cut so, or None if it can."""
        return next(self._misfits(module), None)

    def _misfits(self, module: nn.Module) -> Iterator[str]:
        if "forward" in vars(module):
            yield "its forward was replaced on the instance"
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
        for name, parameter in own.items():
            if type(parameter) is not nn.Parameter:
                yield f"its {name} is a {type(parameter).__name__}, not an nn.Parameter"
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                yield f"its {name} has gradient hooks: shard a model before it is wrapped"
        widths = set()
        for name, slices in self.sharded.items():
            shape, packed = tuple(own[name].shape), slices.parts * slices.unit
            if slices.dim >= len(shape) or shape[slices.dim] % packed:
                yield f"its {name} {shape} has no dim {slices.dim} of {packed} equal parts"
                return
            widths.add(shape[slices.dim] // packed)
        if len(widths) > 1:
            yield f"its parameters are of the widths {sorted(widths)}, where one is cut"

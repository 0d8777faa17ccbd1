"""Parameters of an attention module itself that have something for each of its query heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ....dist.errors import InvalidArgumentError


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

    def heads(self, module: nn.Module) -> int:
        """Return how many heads, or features, the parameters of a module that fits are for."""
        return int(module.get_parameter(self.names[0]).shape[0])

    def misfit(self, module: nn.Module) -> str | None:
        """Return why the parameters of a module cannot be cut so, or None if they can."""
        return next(self._misfits(module), None)

    def _misfits(self, module: nn.Module) -> Iterator[str]:
        if "forward" in vars(module):
            yield "its forward was replaced on the instance"
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if own.keys() != {*self.names}:
            yield f"its own parameters are {', '.join(own) or 'none'}"
            return
        for name, parameter in own.items():
            if type(parameter) is not nn.Parameter:
                yield f"its {name} is a {type(parameter).__name__}, not an nn.Parameter"
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                yield f"its {name} has gradient hooks: shard a model before it is wrapped"
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
            yield f"its parameters are of the shapes {shapes}, where each has a dim 0 of all heads"

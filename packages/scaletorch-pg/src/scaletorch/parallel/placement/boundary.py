"""Boundaries: placements of a module's inputs, outputs and parameters; and views of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from torch import nn

from ...dist.errors import InvalidArgumentError
from .conversion import Invariant, Partial, Placement, Replicate, Shard, require_conversion

Side = Placement | tuple[Placement, Placement]

_INVARIANT = Invariant()


@dataclass(frozen=True, slots=True)
class Boundary:
    """The placements of a module's inputs, outputs and parameters on one axis.

    A pair of placements is a conversion: of inputs, from what arrives to what the module computes
    with; of outputs, from what it computes to what it returns. A single placement is both.

    Args:
        inputs: Placement of all floating-point inputs, or name of an argument -> placement; an
            argument without an entry is not converted.
        outputs: Placement of all floating-point outputs; None leaves them as they are.
        parameters: Name of the module's own parameter -> `Shard(dim)`, or `Partial()` for one that
            is added to terms of a sum: ranks but the first add zeros. Others are replicated.

    Example:
        >>> whole_to_terms = (Invariant(), Replicate()), (Partial(), Invariant())
        >>> mlp = Boundary(*whole_to_terms, {"up": Shard(0), "down": Shard(1)})
    """

    inputs: Side | Mapping[str, Side] = _INVARIANT
    outputs: Side | None = _INVARIANT
    parameters: Mapping[str, Placement] = field(default_factory=dict)

    @classmethod
    def from_torch(cls, style: Any, module: nn.Module) -> Boundary:
        """Return the boundary of a module in a plan of `torch.distributed.tensor.parallel`.

        A replicated DTensor is `Invariant()` here, since its gradient is replicated too.

        Args:
            style: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`, `PrepareModuleInput`,
                `PrepareModuleOutput` or `PrepareModuleInputOutput`.
            module: The module with that style.

        Raises:
            InvalidArgumentError: The style or a placement has no counterpart.
        """
        from torch.distributed.tensor import parallel

        match style:
            case parallel.ColwiseParallel() | parallel.RowwiseParallel():
                columns = isinstance(style, parallel.ColwiseParallel)
                arrives, returns = map(_ours, (*style.input_layouts, *style.output_layouts))
                of_ids = isinstance(module, nn.Embedding)
                needed = Replicate() if columns else Shard(-1)
                sharded = {"weight": Shard(0 if columns != of_ids else 1)}
                if columns and getattr(module, "bias", None) is not None:
                    sharded["bias"] = Shard(0)
                inputs = _INVARIANT if of_ids else _side(arrives, needed)
                return cls(inputs, _side(Shard(-1) if columns else Partial(), returns), sharded)
            case parallel.SequenceParallel():
                [shard] = map(_ours, style.sequence_sharding)
                return cls(shard, shard)
            case parallel.PrepareModuleInput():
                names = [*signature(type(module).forward).parameters][1:]
                before = dict(zip(names, style.input_layouts or (), strict=False))
                after = dict(zip(names, style.desired_input_layouts or (), strict=False))
                before |= style.input_kwarg_layouts
                after |= style.desired_input_kwarg_layouts
                known = {n: _pair(p, after[n]) for n, p in before.items() if p is not None}
                return cls(known, outputs=None)
            case parallel.PrepareModuleOutput():
                layouts = zip(style.output_layouts, style.desired_output_layouts, strict=True)
                found = {_pair(src, dst) for src, dst in layouts if src is not None}
                if len(found) == 1:
                    return cls({}, found.pop())
            case parallel.PrepareModuleInputOutput():
                inner = cls.from_torch(style.prepare_module_input, module)
                outer = cls.from_torch(style.prepare_module_output, module)
                return replace(inner, outputs=outer.outputs)
        raise InvalidArgumentError(
            f"{style!r} has no counterpart among boundaries; write a Boundary for the "
            f"{type(module).__name__}"
        )

    def __str__(self) -> str:
        """Return the style's name in tables."""
        return "boundary"

    @property
    def dims(self) -> dict[str, int]:
        """The shard dim of each sharded parameter."""
        return {name: p.dim for name, p in self.parameters.items() if isinstance(p, Shard)}

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the parameters that are added to terms of a sum."""
        return tuple(name for name, p in self.parameters.items() if isinstance(p, Partial))

    @property
    def places(self) -> dict[str, Side]:
        """The description of each input and output in messages -> its placement."""
        named = self.inputs if isinstance(self.inputs, Mapping) else {"": self.inputs}
        inputs = {f"the input {name!r}" if name else "the input": s for name, s in named.items()}
        return inputs if self.outputs is None else {**inputs, "the output": self.outputs}

    @property
    def converts(self) -> bool:
        """True if an input or output is converted."""
        return any(src != dst for src, dst in map(ends, self.places.values()))

    def require_conversions(self, where: str) -> None:
        """Refuse a pair without a conversion; `where` names the module and the axis."""
        for place, side in self.places.items():
            require_conversion(*ends(side), f"{place} of {where}")


def ends(side: Side) -> tuple[Placement, Placement]:
    """Return the placements before and after a conversion."""
    return side if isinstance(side, tuple) else (side, side)


def _pair(src: Any, dst: Any) -> Side:
    """Return the conversion between two layouts of DTensors; None means none."""
    return _side(_ours(src), _ours(src if dst is None else dst))


def _side(src: Placement, dst: Placement) -> Side:
    return src if src == dst else (src, dst)


def _ours(layout: Any) -> Placement:
    """Return the placement of a DTensor on one axis."""
    kind = type(layout).__name__
    if kind == "Shard":
        return Shard(layout.dim)
    if kind == "Replicate":
        return Invariant()
    if kind == "Partial" and layout.reduce_op == "sum":
        return Partial()
    raise InvalidArgumentError(f"{layout!r} of a DTensor has no counterpart among placements")


class ModelView:
    """The modules of a model, and the owners of each parameter.

    It is not updated: create a new one after a change to the model.

    Args:
        model: Any module.

    Attributes:
        model: The module.
        names: Each module of the model and its first name, in the model's order.
        owners: Each parameter and its owners, as pairs of a module and the name in it. A tied
            parameter has several.

    Example:
        >>> view = ModelView(model)
        >>> tied = [owners for owners in view.owners.values() if len(owners) > 1]
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.names:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners.setdefault(parameter, []).append((module, name))


def modules_within(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules and all their submodules."""
    return {inner for module in modules for inner in module.modules()}

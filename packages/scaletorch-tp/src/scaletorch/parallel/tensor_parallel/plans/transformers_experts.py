"""Experts in plans of transformers: their module has a style, and each stacked parameter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.stacked import Slices, Stacked

EXPERTS = "moe_tp_experts"  # the module's style
SUMMED = "all_reduce"  # and that of shared experts that are stacked
GATHERED = "gather"  # in transformers 5.0, experts whose parameters have one of `_LOCAL`
ROUTER = "ep_router"  # until 5.2 in these plans, too: a router is whole on every rank
APART = "grouped_gemm"  # in 5.0: a rank has whole experts, which is no tensor parallelism
_LOCAL = ("local_colwise", "local_rowwise")  # these do not tell which dim is the width

# A parameter's style -> the dim of [experts, out, in] that it cuts, and how many parts are packed.
# Stacks that are transposed are given the style of the other dim.
_SLICES: Mapping[str, tuple[int, int]] = {
    "colwise": (1, 1),
    "packed_colwise": (1, 2),
    "rowwise": (2, 1),
    "packed_rowwise": (2, 2),
}


def stacked_of(name: str, module: nn.Module, styles: Mapping[str, str]) -> Stacked:
    """Return how a plan of transformers cuts a module of experts.

    Gate and up in one weight follow one another, or are interleaved, as the module says; biases,
    which plans do not name, are cut as the output of their weight, or added once.

    Args:
        name: The module's.
        module: The module.
        styles: Parameter -> its style in the plan.

    Raises:
        InvalidArgumentError: A parameter has no style, or one that cuts no stack.
    """
    sharded: dict[str, Slices | int] = {}
    added: list[str] = []
    for own, style in _packed(module, styles).items():
        if style not in _SLICES:
            raise InvalidArgumentError(
                f"the model's own plan (_tp_plan) gives '{name}.{own}' of the experts the style "
                f"{style!r}, which is none of {', '.join(map(repr, _SLICES))}; pass a plan of "
                "your own"
            )
        dim, parts = _SLICES[style]
        apart = parts == 1 or getattr(module, "is_concatenated", True)
        sharded[own] = Slices(dim, parts=parts) if apart else Slices(dim, unit=parts)
    out = 2 if getattr(module, "is_transposed", False) else 1
    for own in module._parameters:
        slices = sharded.get(own.removesuffix("_bias"))
        if own in sharded or not isinstance(slices, Slices):
            continue
        if slices.dim == out:
            sharded[own] = Slices(1, slices.parts, slices.unit)
        else:
            added.append(own)
    if not sharded:
        raise InvalidArgumentError(
            f"the model's own plan (_tp_plan) gives the experts '{name}' a style and none of "
            f"their parameters ({', '.join(module._parameters)}); pass a plan of your own"
        )
    return Stacked(sharded, tuple(added))


def _packed(module: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles, of which that of gate and up in one weight says that they are two.

    Plans that cut the weight as one would give a rank gates without the ups of the same features.
    """
    found = dict(styles)
    gate_up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None or not gate_up.ndim == down.ndim == 3:
        return found
    rows, columns = (gate_up.shape[d] == 2 * down.shape[e] for d, e in ((1, 2), (2, 1)))
    if rows and {found.get(name) for name in ("gate_up_proj", "down_proj")} <= {*_LOCAL}:
        found |= {"gate_up_proj": "colwise", "down_proj": "rowwise"}
    if found.get("gate_up_proj") == ("colwise" if rows else "rowwise") and (rows or columns):
        found["gate_up_proj"] = f"packed_{found['gate_up_proj']}"
    return found

"""Rewrite a whole model into this rank's shard of it; the layers are importable from here too."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ...dist import get_world_size
from ..pg_manager import axis_group
from .base import Memo, TensorParallelLayer
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .plan import STYLES, Divide, Match, Plan, find_mixins
from .region import SharedInputs
from .surround import cannot_surround, surround
from .validate import resolve_plan

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelLayer",
    "VocabParallelEmbedding",
    "apply_tensor_parallel",
]

M = TypeVar("M", bound=nn.Module)


def apply_tensor_parallel(
    model: M, plan: Plan | None = None, group: ProcessGroup | None = None
) -> M:
    """Turn a model into this rank's shard of it, in place, without communication.

    The modules that the plan names become tensor-parallel layers themselves (their class changes,
    as with FSDP2), so names, hooks and other references to them stay, the root's included. Their
    parameters are replaced: make the optimizer afterwards. Tied parameters stay tied.

    Args:
        model: The whole model, equal on every rank.
        plan: Pattern of module names -> style. `*` stands for any text inside one component of a
            name, a component `**` for any number of components; "" is the root. Styles are
            "column", "column_gather", "row", "vocab", "replicate", "replicate_sum_grad",
            "sharded" and `Divide`. None is the plan of the known family whose names the model has.
        group: Ranks of the tensor-parallel axis; None is that axis of the current manager.

    Returns:
        The model.

    Raises:
        InvalidArgumentError: The plan does not fit the model: a pattern matches nothing, two
            match one module, a style does not fit a module, or tp does not divide a size. It is
            the same error on every rank, and the model is as before.

    Example:
        >>> apply_tensor_parallel(model, {"**.fc1": "column", "**.fc2": "row"})
    """
    group = axis_group("tp", group)
    tp_size = get_world_size(group)
    matches = resolve_plan(model, plan, tp_size)
    mixins = find_mixins(matches) if tp_size > 1 else {}
    memo: Memo = WeakTensorKeyDictionary()  # holds no whole parameter that nobody else holds
    for match in matches:
        _rewrite(match, tp_size, group, memo)
    for module, mixin in mixins.items():
        surround(module, mixin, group)
    for module in _sharing(model) if tp_size > 1 else ():
        surround(module, SharedInputs, group)
    return model


def _sharing(model: nn.Module) -> list[nn.Module]:
    """Return the modules of which several children are column parallel."""
    column = ColumnParallelLinear
    return [
        module
        for module in model.modules()
        if sum(isinstance(child, column) for child in module.children()) > 1
        and cannot_surround(module, SharedInputs) is None
    ]


def _rewrite(match: Match, tp_size: int, group: ProcessGroup | None, memo: Memo) -> None:
    if isinstance(match.style, Divide):
        own = vars(match.module)
        own.update({k: own[k] // tp_size for k in match.style.attributes if k in own})
        return
    style = STYLES[match.style]
    if isinstance(style, tuple):
        layer, options = style
        layer.convert(match.module, group, memo, **options)

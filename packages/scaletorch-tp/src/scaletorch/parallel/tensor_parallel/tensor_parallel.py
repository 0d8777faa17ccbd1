"""Rewrite a whole model into this rank's shard of it; the layers are importable from here too."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ...dist import get_rank, get_world_size
from ..pg_manager import axis_group
from .cuts.cut import Cut
from .layers.base import Memo, TensorParallelLayer
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .optimizers import watch
from .plans.plan import Match, Plan, find_mixins
from .plans.shares import check_shares
from .plans.validate import resolve
from .plans.whole import find_whole
from .regions.region import Region
from .regions.sequence import share_sequences
from .regions.sum_grad import SumGradients
from .regions.surround import cannot_surround, surround

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelLayer",
    "VocabParallelEmbedding",
    "apply_tensor_parallel",
]

M = TypeVar("M", bound=nn.Module)


def apply_tensor_parallel(
    model: M,
    plan: Plan | None = None,
    group: ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
) -> M:
    """Turn a model into this rank's shard of it, in place, without communication.

    The modules that the plan names become tensor-parallel layers themselves (their class changes,
    as with FSDP2), so names, hooks and other references to them stay, the root's included. Their
    parameters are replaced: make the optimizer afterwards. Tied parameters stay tied.

    Args:
        model: The whole model, equal on every rank.
        plan: Pattern of module names -> style. `*` stands for any text inside one component of a
            name, a component `**` for any number of components; "" is the root. Styles are
            "column", "column_gather", "row", "row_split", "vocab", "replicate", "sequence",
            "sequence_join", "replicate_sum_grad", "sharded", `Fused` and `Divide`. None is the
            model's own plan (transformers), or that of the known family whose names it has.
        group: Ranks of the tensor-parallel axis; None is that axis of the current manager.
        sequence_parallel: Between sharded layers each rank holds its share of every sequence.

    Returns:
        The model.

    Raises:
        InvalidArgumentError: The plan does not fit the model: a pattern matches nothing, two
            match one module, a style does not fit a module, or a size leaves a rank no share. It
            is the same error on every rank, and the model is as before.

    Example:
        >>> apply_tensor_parallel(model, {"**.fc1": "column", "**.fc2": "row"})
    """
    group = axis_group("tp", group)
    tp_size = get_world_size(group)
    matches, cuts, attributes = resolve(model, plan, tp_size)
    if sequence_parallel:
        check_shares(model, matches)
    mixins = find_mixins(matches) if tp_size > 1 else {}
    memo: Memo = WeakTensorKeyDictionary()  # holds no whole parameter that nobody else holds
    for match in matches:
        _rewrite(match, group, memo, cuts.get(match.module))
    for module, values in attributes.items():
        vars(module).update({name: ranks[get_rank(group)] for name, ranks in values.items()})
    for module, mixin in mixins.items():
        surround(module, mixin, group)
    if tp_size > 1:
        watch(model)
        for module in find_regions(model):
            # A model is called with ids, not with a share of hidden states.
            if module is not model or not sequence_parallel:
                surround(module, Region, group)
        if sequence_parallel:
            replicated = [match.module for match in matches if match.style == "replicate"]
            regions = [module for module in model.modules() if isinstance(module, Region)]
            share_sequences(model, group, replicated, find_whole(model, regions))
    return model


def find_regions(model: nn.Module) -> list[nn.Module]:
    """Return the modules that begin with column-parallel layers and end with one row-parallel.

    All parameters of their other children are summed or sharded: a block with a norm of whole
    hidden states is none.
    """
    return [
        module
        for module in model.modules()
        if _is_region(module) and cannot_surround(module, Region) is None
    ]


def _is_region(module: nn.Module) -> bool:
    children = list(module.children())
    columns = [child for child in children if isinstance(child, ColumnParallelLinear)]
    rows = [child for child in children if isinstance(child, RowParallelLinear)]
    inside = TensorParallelLayer, SumGradients
    return (
        bool(columns)
        and len(rows) == 1
        and all(
            isinstance(child, inside) or next(child.parameters(), None) is None
            for child in children
        )
    )


def _rewrite(match: Match, group: ProcessGroup | None, memo: Memo, cut: Cut | None) -> None:
    if match.layer is not None:
        match.layer.convert(match.module, group, memo, cut, **match.options)

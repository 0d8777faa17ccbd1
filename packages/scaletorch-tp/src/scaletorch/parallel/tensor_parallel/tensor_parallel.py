"""Rewrite a whole model into this rank's shard of it; the layers are importable from here too."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ...dist import get_rank, get_world_size
from ..pg_manager import axis_group
from ..pg_manager.building import divided_modules
from .layers.base import Memo, TensorParallelLayer
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .layers.multihead import leave_fast_paths
from .optimizers import watch
from .plans.plan import Plan
from .plans.resolve import Resolved
from .plans.suggest import resolve_or_suggest
from .regions.region import Region
from .regions.surround import surround
from .sharing.adapters import check_adapters, shard_adapters, without_adapters
from .sharing.gradient_sums import infer_sums
from .sharing.sequence import share_sequences

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
    parameters are replaced: make the optimizer afterwards. Tied parameters stay tied. Low-rank
    adapters of peft are cut as their layers are, which the plan names as in the plain model.
    Which gradients of whole parameters are summed over the ranks follows from the graph of a
    forward; no plan says it.

    Args:
        model: The whole model, equal on every rank.
        plan: Pattern of module names -> style. `*` stands for any text inside one component of a
            name, a component `**` for any number of them; "" is the root. Styles are "column",
            "column_gather", "row", "row_split", "vocab", "attention", "replicate", "sequence",
            "sharded", "sequence_layer", "sequence_whole", `Fused`, `Stacked`, `PerHead`,
            `SharedTail` and `Divide`. None is the model's own plan (transformers), its family's or
            that of layers of `torch.nn`, but for experts divided already.
        group: Ranks of the tensor-parallel axis; None is that axis of the current manager.
        sequence_parallel: Between sharded layers each rank holds its share of every sequence.

    Returns:
        The model.

    Raises:
        InvalidArgumentError: A pattern matches nothing, two match one module, a style does not
            fit a module, a size leaves a rank no share, or an adapter cannot be cut. It is the
            same error on every rank, and the model is as before.

    Example:
        >>> apply_tensor_parallel(model, {"**.fc1": "column", "**.fc2": "row"})
    """
    group = axis_group("tp", group)
    tp_size, divided = get_world_size(group), divided_modules(model, group)
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    with without_adapters(model) as adapters:
        resolved = resolve_or_suggest(model, plan, tp_size, divided=divided, **options)
        layers = {match.module: match.layer for match in resolved.matches.values()}
        check_adapters(adapters, layers, sequence_parallel=sequence_parallel and tp_size > 1)
        memo = _shard(resolved, group)
        if tp_size > 1:
            _wrap(resolved, group, **options)
            infer_sums(resolved.view, group)
            shard_adapters(adapters, group, memo, **options)
    return model


def _shard(resolved: Resolved, group: ProcessGroup | None) -> Memo:
    """Turn layers into this rank's shards and set attributes; return the shards."""
    memo: Memo = WeakTensorKeyDictionary()  # holds no whole parameter that nobody else holds
    for match in resolved.matches.values():
        if match.layer is not None:
            match.layer.convert(match.module, group, memo, match.cut, **match.options)
    for module, values in resolved.attributes.items():
        vars(module).update({name: ranks[get_rank(group)] for name, ranks in values.items()})
    return memo


def _wrap(resolved: Resolved, group: ProcessGroup | None, *, sequence_parallel: bool) -> None:
    """Let modules around the shards begin and end regions, draw apart, and share sequences."""
    view = resolved.view
    for match in resolved.matches.values():
        if match.mixin is not None:
            surround(match.module, match.mixin, group)
            vars(match.module).update({} if match.layer else match.options)
    watch(view.model)
    leave_fast_paths(view)
    for module in resolved.regions:
        # A model is called with ids, not with a share of hidden states.
        if module is not view.model or not sequence_parallel:
            surround(module, Region, group)
    if sequence_parallel:
        share_sequences(view, group, resolved.whole)

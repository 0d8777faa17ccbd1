"""Parallelize a plain module over all axes of a grid."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..dist import all_reduce, get_rank
from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import apply_context_parallel
from ..parallel.context_parallel.building import expect_attention
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ModuleWrapper, ProcessGroupManager
from ..parallel.pipeline_parallel import AnySchedule, PipelineParallel, Split
from ..parallel.pipeline_parallel.building import parameter_costs, sections_of
from ..parallel.tensor_parallel import apply_tensor_parallel
from .checks import require_one_model, synchronise_batch_norms
from .experts import Plan, divide_experts, expert_groups, settle_tokens
from .forward import Counting, Terms, keep_terms, read_terms, require_manager, require_own_names
from .loss import keep_logits_sharded
from .plain import Plain
from .recompute import recompute_layers, require_way
from .scaling import watch
from .state import keep_whole_state, whole_shapes


class _Args(NamedTuple):
    """The arguments of `parallelize` that are the same on every rank."""

    sequence_parallel: bool
    loss_parallel: bool
    recompute: bool | str
    cp_layout: str
    cp_method: str
    rehearse: bool


def parallelize(
    model: nn.Module,
    manager: ProcessGroupManager,
    *,
    plan: Mapping[str, Any] | None = None,
    split: Split | None = None,
    schedule: AnySchedule = "1f1b",
    bucket_size: int = 2**24,
    recompute: bool | str = False,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    cp_layout: str = "zigzag",
    cp_method: str = "ring",
    data_parallel: Mapping[str, Any] | None = None,
    rehearse: bool = True,
) -> DataParallelBucket:
    """Shard a model over every axis of a grid, in place; all ranks call it.

    Every rank passes the same whole model. Before sharding, the ranks compare arguments, and values
    over tp and pp; afterwards, each shard over cp and dp. `data_parallel={"init_sync": "none"}`
    leaves that out.

    Args:
        model: A plain module; its parameters keep their names.
        manager: The grid; axes of size 1 cost nothing.
        plan: Tensor parallel plan; "experts" marks expert modules, `Stacked` those that tp cuts as
            well. None uses the model's own plan, or one that a forward suggests.
        split: Pipeline split; None infers it from the module.
        schedule: A name, a schedule, or a function of numbers of ranks and micro-batches.
        bucket_size: Elements in a gradient bucket.
        recompute: True runs layers again in backward, "selective" only their cheap operations.
        sequence_parallel: Let each tp rank hold a shard of every sequence from the first to the
            last layer, as in `apply_tensor_parallel`.
        loss_parallel: Keep logits sharded over tp; the head must have the style "column_gather".
        cp_layout: Order of positions: "zigzag" for causal, "contiguous" for full attention.
        cp_method: Context-parallel attention: "ring", "all_gather", "ulysses", "hybrid" or "auto".
        data_parallel: Further settings of `DataParallelBucket`, such as `grad_type` or `order`.
        rehearse: Let the first `train_step` compare with the plain model; see `rehearse`.

    Returns:
        This rank's pipeline stage, which knows the grid. Pass it to `train_step`, and make the
        optimizer for its parameters. Gradients are summed over ranks that hold the same shard.

    Raises:
        InvalidArgumentError: The plan does not fit, or the grid cannot train the model.
        MismatchError: Models or arguments differ between ranks; names the parameters and ranks.
    """
    settings = _Args(sequence_parallel, loss_parallel, recompute, cp_layout, cp_method, rehearse)
    terms = _checked(model, manager, settings, (data_parallel or {}).get("init_sync", "check"))
    shapes = whole_shapes(model)
    layers = divide_experts(model, manager, plan, shares_sequences=terms.shares_sequences)
    if manager.tp_size > 1:  # before the pipeline drops layers; a single rank needs no plan
        _shard_layers(model, manager, layers, settings, terms)
    apply_context_parallel(model, manager.cp_group, layout=cp_layout, method=cp_method)
    # After the strategies that change layers: a second run repeats their communication too.
    recompute_layers(model, split, recompute=recompute)
    cut = _agreed_split(model, split, manager)
    stage = PipelineParallel(model, cut, manager.pp_group, schedule=schedule)
    keep_whole_state(stage.module, shapes, manager)
    return _in_buckets(stage, terms, manager, {"bucket_size": bucket_size, **(data_parallel or {})})


def _agreed_split(
    model: nn.Module, split: Split | None, manager: ProcessGroupManager
) -> Split | None:
    """Replace costs by the maximum over ranks, so that all cut at the same layers."""
    if not isinstance(split, Split) or split.costs != "parameters" or manager.pp_size == 1:
        return split
    costs = parameter_costs(model, sections_of(model, split))
    most = torch.tensor(costs, dtype=torch.int64)
    all_reduce(most, "max", group=manager.world_group)
    return replace(split, costs=tuple(most.tolist()))


def _in_buckets(
    stage: PipelineParallel, terms: Terms, manager: ProcessGroupManager, options: Mapping[str, Any]
) -> DataParallelBucket:
    """Wrap a stage in gradient buckets, once only this rank's parameters remain."""
    stage.runtime.steps_alone = True
    groups = expert_groups(stage, manager)
    parallel = DataParallelBucket(stage, group=manager.cp_dp_group, groups=groups, **options)
    expect_attention(stage.module, terms.plain is None)
    keep_terms(parallel, terms)
    if manager.world_size > 1:
        watch(parallel, manager)
    return parallel


def _copy_plain(model: nn.Module) -> Plain | None:
    """Return a copy of a plain model without weights; warn and return None if copying fails."""
    try:
        return Plain(model)
    except Exception as error:  # a module may do anything
        if get_rank() == 0:
            warnings.warn(
                f"{type(model).__name__} is not rehearsed, since it cannot be copied ({error})",
                RuntimeWarning,
                stacklevel=5,
            )
        return None


def _shard_layers(
    model: nn.Module, manager: ProcessGroupManager, plan: Plan, settings: _Args, terms: Terms
) -> None:
    """Shard the layers over tp, in place."""
    shares = settings.sequence_parallel
    apply_tensor_parallel(model, plan, manager.tp_group, sequence_parallel=shares)
    if settings.loss_parallel:
        keep_logits_sharded(model)
    if shares:
        settle_tokens(model, manager)


def _checked(
    model: nn.Module, manager: ProcessGroupManager, settings: _Args, init_sync: str
) -> Terms:
    """Return the terms of a plain model; raise on every rank if any rank finds an error."""
    require_manager(manager, needed=True)
    terms, failed = Terms("", {}, takes_any=True), None
    try:
        terms = _terms(model, manager, settings)
    except Exception as error:  # `require_one_model` raises it, so that all ranks raise
        failed = error
    require_one_model(model, settings._asdict(), manager, init_sync=init_sync, error=failed)
    return terms


def _terms(model: nn.Module, manager: ProcessGroupManager, settings: _Args) -> Terms:
    if not isinstance(model, nn.Module) or isinstance(model, ModuleWrapper):
        raise InvalidArgumentError(
            f"parallelize takes a plain nn.Module, got {type(model).__name__}"
        )
    require_own_names(model)
    require_way(settings.recompute)
    shares = manager.tp_size > 1 and bool(settings.sequence_parallel)
    plain = _copy_plain(model) if settings.rehearse else None
    synchronise_batch_norms(model, manager)
    terms = read_terms(model)
    terms.plain = plain
    terms.manager, terms.shares_sequences = manager, shares
    terms.recomputes = settings.recompute is True
    if manager.cp_size > 1:
        terms.cp_layout = str(settings.cp_layout)
    terms.needs_positions = manager.cp_size > 1 or (shares and manager.pp_size > 1)
    if terms.needs_positions:
        terms.counting = _counting(model)
    return terms


def _counting(model: nn.Module) -> Counting | None:
    """Return a model's own function from whole rows of ids to positions, as RoBERTa has it."""
    for module in model.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        padding = getattr(module, "padding_idx", None)
        if callable(count) and isinstance(padding, int):
            return partial(count, padding_idx=padding)
    return None

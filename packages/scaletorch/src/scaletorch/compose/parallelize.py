"""One call that puts a plain module on the whole grid."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..dist import all_reduce, get_rank
from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import apply_context_parallel
from ..parallel.context_parallel.building import expect_attention
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ModuleWrapper, ProcessGroupManager
from ..parallel.pipeline_parallel import AnySchedule, PipelineParallel, Split
from ..parallel.pipeline_parallel.building import parameter_costs, parts_of
from ..parallel.tensor_parallel import apply_tensor_parallel
from ..parallel.tensor_parallel.building import counts_of_ids, shares_in_layers
from .balance import read_router_loss
from .before.batch_norm import synchronise_batch_norms
from .before.initial import require_one_model
from .experts import divide_experts, expert_groups, settle_tokens
from .forward import Counting, Terms, keep_terms, read_terms, require_manager, require_own_names
from .loss import keep_logits_sharded
from .plain import Plain
from .recompute import recompute_layers, require_way
from .state import keep_whole_state, whole_shapes
from .updates import watch


@dataclass(frozen=True, slots=True)
class _How:
    """The arguments of `parallelize`; the same on every rank."""

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
    """Put a model on every axis of a grid, in place; what comes back knows the grid.

    Each rank passes the same whole model (same seed or checkpoint); comparing them reads it once.

    Args:
        model: A plain module; its parameters keep their names.
        manager: The grid; axes of size 1 cost nothing.
        plan: Tensor parallel plan, and modules of experts as "experts", or as `Stacked` if cut
            over tp too; None recognises the model's family, and its own plans.
        split: Pipeline split; None infers it from the module.
        schedule: Of the pipeline: a name, a function of ranks and micro-batches, or a schedule.
        bucket_size: Elements in a gradient bucket.
        recompute: Layers run again in backward; "selective": only what is cheap to make again
            does; "offload": the host keeps their activations.
        sequence_parallel: Between sharded layers each tp rank holds its shard of every sequence.
        loss_parallel: Logits stay sharded over tp, of a head that is "column_gather".
        cp_layout: Of positions: "zigzag" for causal attention, "contiguous" for attention to all.
        cp_method: How cp ranks attend: "ring", "all_gather", "ulysses", "hybrid" or "auto".
        data_parallel: Further settings of `DataParallelBucket`, such as `grad_type` or `order`.
        rehearse: The first `train_step` begins with a rehearsal, see `rehearse`.

    Returns:
        The model's stage of this rank, with gradients summed over the ranks that have the same.

    Raises:
        InvalidArgumentError: The plan does not fit, or the model cannot train so (a router's loss,
            its shape in a pipeline).
        MismatchError: The ranks' models or arguments differ; names the parameters and the ranks.
    """
    settings = _How(sequence_parallel, loss_parallel, recompute, cp_layout, cp_method, rehearse)
    terms = _checked(model, manager, settings, (data_parallel or {}).get("init_sync", "check"))
    shapes = whole_shapes(model)
    layers = divide_experts(model, manager, plan, shares_sequences=terms.shares_sequences)
    if manager.tp_size > 1:  # while all layers are there; one rank needs no plan
        _shard_layers(model, manager, layers, settings, terms)
    apply_context_parallel(model, manager.cp_group, layout=cp_layout, method=cp_method)
    # Around all that a layer does, communication included.
    recompute_layers(model, split, recompute=recompute)
    cut = _agreed_split(model, split, manager)
    stage = PipelineParallel(model, cut, manager.pp_group, schedule=schedule)
    keep_whole_state(stage.module, shapes, manager)
    return _in_buckets(stage, terms, manager, {"bucket_size": bucket_size, **(data_parallel or {})})


def _agreed_split(
    model: nn.Module, split: Split | None, manager: ProcessGroupManager
) -> Split | None:
    """Return a split by parameters as one by numbers: the most that any rank has of each part.

    Ranks may have unequal shares, as of three experts on two ranks. Each of them counting its own
    would cut the layers elsewhere.
    """
    if not isinstance(split, Split) or split.costs != "parameters" or manager.pp_size == 1:
        return split
    costs = parameter_costs(model, parts_of(model, split))
    most = torch.tensor(costs, dtype=torch.int64)
    all_reduce(most, "max", group=manager.world_group)
    return replace(split, costs=tuple(most.tolist()))


def _in_buckets(
    stage: PipelineParallel, terms: Terms, manager: ProcessGroupManager, options: Mapping[str, Any]
) -> DataParallelBucket:
    """Sum a stage's gradients, when only this rank's parameters remain, in buckets of their own."""
    stage.runtime.steps_alone = True
    groups = expert_groups(stage, manager)
    parallel = DataParallelBucket(stage, group=manager.cp_dp_group, groups=groups, **options)
    expect_attention(stage.module, terms.plain is None)
    keep_terms(parallel, terms)
    watch(parallel, manager)
    return parallel


def _copy_plain(model: nn.Module) -> Plain | None:
    """Return the structure of a plain model; warn if it cannot be copied."""
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
    model: nn.Module,
    manager: ProcessGroupManager,
    plan: Mapping[str, Any] | None,
    settings: _How,
    terms: Terms,
) -> None:
    """Shard the layers over tp, in place."""
    apply_tensor_parallel(
        model, plan, manager.tp_group, sequence_parallel=settings.sequence_parallel
    )
    if settings.loss_parallel:
        keep_logits_sharded(model)
    if settings.sequence_parallel:
        settle_tokens(model, manager)
        terms.shares_in_layers = shares_in_layers(model)


def _checked(
    model: nn.Module, manager: ProcessGroupManager, settings: _How, init_sync: str
) -> Terms:
    """Return how the plain model wants to be called; refuse, on every rank, what cannot train."""
    require_manager(manager, needed=True)
    terms, failed = Terms("", {}, takes_any=True), None
    try:
        terms = _terms(model, manager, settings)
    except Exception as error:  # the other ranks are told
        failed = error
    require_one_model(model, asdict(settings), manager, init_sync=init_sync, error=failed)
    return terms


def _terms(model: nn.Module, manager: ProcessGroupManager, settings: _How) -> Terms:
    if not isinstance(model, nn.Module) or isinstance(model, ModuleWrapper):
        raise InvalidArgumentError(
            f"parallelize takes a plain nn.Module, got {type(model).__name__}"
        )
    require_own_names(model)
    require_way(settings.recompute)
    shares = manager.tp_size > 1 and bool(settings.sequence_parallel)
    balance = read_router_loss(model, manager)
    plain = _copy_plain(model) if settings.rehearse else None
    synchronise_batch_norms(model, manager)
    terms = read_terms(model)
    terms.plain = plain
    terms.manager, terms.shares_sequences, terms.router_loss = manager, shares, balance
    terms.recomputes = settings.recompute is True
    if manager.cp_size > 1:
        terms.cp_layout = str(settings.cp_layout)
    if manager.cp_size > 1 or shares:
        undivided = manager.cp_size == manager.pp_size == 1
        terms.counts_of_ids = undivided and counts_of_ids(model)
        if not terms.counts_of_ids:
            terms.counting = _counting(model)
    return terms


def _counting(model: nn.Module) -> Counting | None:
    """Return how a model counts positions of whole rows of ids, as RoBERTa and its kin say it."""
    for module in model.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        padding = getattr(module, "padding_idx", None)
        if callable(count) and isinstance(padding, int):
            return partial(count, padding_idx=padding)
    return None

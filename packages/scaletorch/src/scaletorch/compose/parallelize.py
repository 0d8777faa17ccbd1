"""One call that puts a plain module on the whole grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import apply_context_parallel
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ModuleWrapper, ProcessGroupManager
from ..parallel.pipeline_parallel import AnySchedule, PipelineParallel, Split
from ..parallel.tensor_parallel import apply_tensor_parallel, joins_sequences
from .auxiliary import require_no_router_loss
from .batch_norm import synchronise_batch_norms
from .forward import Terms, keep_terms, read_terms
from .initial import require_one_model
from .loss import keep_logits_sharded
from .positions import counts_otherwise
from .recompute import recompute_layers


def parallelize(
    model: nn.Module,
    manager: ProcessGroupManager,
    *,
    plan: Mapping[str, Any] | None = None,
    split: Split | None = None,
    schedule: AnySchedule = "1f1b",
    bucket_size: int = 2**24,
    recompute: bool = False,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    cp_layout: str = "zigzag",
    cp_method: str = "ring",
    data_parallel: Mapping[str, Any] | None = None,
) -> DataParallelBucket:
    """Put ``model`` on every axis of ``manager``'s grid, in place.

    Each rank passes the same whole model (same seed or same checkpoint); they are compared, which
    reads the model once. The order matters: layers are sharded while all are still there, and
    gradients are bucketed once only this rank's remain.

    Args:
        model: a plain module; its parameters keep their names.
        manager: the grid and its groups; axes of size 1 cost nothing.
        plan: tensor parallel plan; None recognises the model's family.
        split: pipeline split; None infers it from the module.
        schedule: of the pipeline: a name, a function of ranks and micro-batches, or a schedule.
        bucket_size: elements per gradient bucket.
        loss_parallel: logits stay divided over tp, and ``train_step`` takes the loss of the parts;
            for a model whose head is "column_gather".
        sequence_parallel: between sharded layers each tp rank holds its share of every sequence.
        recompute: layers drop their activations in forward and run again in backward.
        cp_layout: which positions each cp rank has, ``shard_global_batch`` told alike: "zigzag"
            balances causal attention, and "contiguous" is for attention that sees everything.
        cp_method: how cp ranks attend: "ring", "all_gather", "ulysses", "hybrid" or "auto".
        data_parallel: further settings of ``DataParallelBucket``, such as ``grad_type``,
            ``reduce_dtype`` or ``order``.

    Returns:
        The model's stage of this rank, with gradients summed over CP x DP.

    Raises:
        InvalidArgumentError: The plan does not fit, the model cannot be a pipeline with sequence
            parallelism, its batch norms would see a part of the batch, or its config asks for a
            router's auxiliary loss.
        MismatchError: The ranks' models or arguments differ; names the parameters and the ranks.
    """
    arguments = {
        "sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel,
        "recompute": recompute, "cp_layout": cp_layout, "cp_method": cp_method,
    }  # fmt: skip
    terms = _checked(model, manager, arguments, (data_parallel or {}).get("init_sync", "check"))
    if manager.tp_size > 1:  # one rank needs no plan: any model will do
        apply_tensor_parallel(model, plan, manager.tp_group, sequence_parallel=sequence_parallel)
        if manager.pp_size > 1 and joins_sequences(model):
            raise InvalidArgumentError(
                "this model takes sequences to be whole behind its blocks (its plan styles a "
                "module 'sequence_join'), but with sequence parallelism the stages of a pipeline "
                "pass on shares: use one of the two"
            )
        if loss_parallel:
            keep_logits_sharded(model)
    apply_context_parallel(model, manager.cp_group, layout=cp_layout, method=cp_method)
    if recompute:  # around all that a layer does, communication included
        recompute_layers(model, split)
    stage = PipelineParallel(model, split, manager.pp_group, schedule=schedule)
    parallel = DataParallelBucket(
        stage, bucket_size=bucket_size, group=manager.cp_dp_group, **data_parallel or {}
    )
    keep_terms(parallel, terms)
    return parallel


def _checked(
    model: nn.Module,
    manager: ProcessGroupManager,
    arguments: Mapping[str, Any],
    init_sync: str,
) -> Terms:
    """Return how the plain model wants to be called; refuse, on every rank, what cannot train."""
    if not isinstance(manager, ProcessGroupManager):
        raise InvalidArgumentError(
            "manager must be a ProcessGroupManager, as setup_process_group_manager returns it; "
            f"it is a {type(manager).__name__}"
        )
    terms, failed = Terms("", {}, takes_any=True), None
    try:
        terms = _terms(model, manager, arguments)
    except Exception as error:  # the other ranks are told
        failed = error
    require_one_model(model, arguments, manager, init_sync=init_sync, error=failed)
    return terms


def _terms(model: nn.Module, manager: ProcessGroupManager, arguments: Mapping[str, Any]) -> Terms:
    if not isinstance(model, nn.Module) or isinstance(model, ModuleWrapper):
        raise InvalidArgumentError(
            f"parallelize takes a plain nn.Module, got {type(model).__name__}"
        )
    shares = manager.tp_size > 1 and bool(arguments["sequence_parallel"])
    require_no_router_loss(model)
    synchronise_batch_norms(model, manager, recompute=bool(arguments["recompute"]), shares=shares)
    terms = read_terms(model)
    terms.shares_sequences = shares
    if manager.cp_size > 1:
        terms.cp_layout = str(arguments["cp_layout"])
    if manager.cp_size > 1 or shares:
        terms.counts_otherwise = counts_otherwise(model, terms)
    return terms

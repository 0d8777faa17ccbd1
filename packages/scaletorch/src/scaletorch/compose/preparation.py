"""Prepare a step: check each rank's batch and model, and share the outcome with all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..dist import all_reduce, get_comm_device
from ..dist.building import agree
from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel.building import note_padding, note_shards, require_computable
from ..parallel.data_parallel import DataParallelBucket, parameter_shards
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pipeline_parallel.building import read
from .batches import Batch, Called, MicroBatch, counts_nothing, size_of, token_count
from .checks import require_one_batch, require_whole_batches
from .entries import LABELS, OF_LOSS, POSITIONS, TOKENS, first_entry, sequence_shape
from .forward import Terms, pipeline_of
from .own_loss import Number, OwnLoss
from .samples import FACTS, samples_of

_ASKS = 2**20  # a rank that wants a rehearsal adds this to the count of ranks with a loss_fn
_OTHERWISE = (
    "{} counts its positions from its padding index on, and needs position_ids where sequences "
    "are divided: call shard_global_batch(..., model=model), or put position_ids [B, L] into the "
    "global batch"
)


def prepare_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
    own_loss: OwnLoss | None = None,
    trains: bool = True,
) -> tuple[list[Called], Number]:
    """Return the micro-batches as the model is called with them, and the count of the global batch.

    One all-reduce of 144 bytes in host memory counts tokens or losses, reports whether a rank
    failed, and compares last step's samples. A second one counts labels on an accelerator, so
    that the host does not wait; then the count is a 0-d tensor. If a loss_fn counts its
    losses later, the count is the size of the batch.

    Raises:
        ScaletorchError: This rank's batch or model has an error.
        MismatchError: Another rank cannot go on, or ranks differ.
    """
    samples = samples_of(model, manager) if trains else None
    called: list[Called] = []
    count: float | Tensor = 0.0
    failed: list[Exception] = []
    try:
        called = _called(model, micro_batches, manager, terms, own_loss, trains)
        count = _counted(called, model, own_loss) if trains else 0.0
        if samples is not None:
            samples.look()
    except Exception as error:  # raised after the all-reduce, in which the other ranks wait
        failed.append(error)
    counts = manager.tp_rank == 0 and pipeline_of(model).is_last_stage
    alone, on_device = not model.require_backward_grad_sync, isinstance(count, Tensor)
    facts = {
        "count": 0.0 if isinstance(count, Tensor) or not counts else count,
        "on device": on_device,
        "failed": bool(failed),
        "alone": alone,
        "own loss": (own_loss is not None) + _ASKS * (trains and terms.rehearses),
        "several": len(micro_batches) > 1,
        "counts later": own_loss is not None and own_loss.counts_later,
        "padded": any(_has_padding(batch.micro_batch) for batch in called),
        **(dict.fromkeys(FACTS, 0.0) if samples is None else samples.facts()),
    }
    told = torch.tensor([*facts.values()], dtype=torch.float64)  # a loss_fn may count in fractions
    all_reduce(told, group=manager.world_group)
    sums = dict(zip(facts, told.tolist(), strict=True))
    terms.several = sums["several"] > 0
    askers, sums["own loss"] = divmod(sums["own loss"], _ASKS)
    terms.rehearses = askers == manager.world_size
    if sums["failed"]:  # popped, since the traceback refers to this frame and thus to the list
        agree("this step", [], manager.world_group, error=failed.pop() if failed else None)
    _require_agreement(sums, manager, alone=alone, has_own=own_loss is not None)
    if trains and not terms.looked:  # the first train step, without a rehearsal
        require_one_batch(micro_batches, manager)
        terms.looked = True
    if sums["padded"]:  # attention that cannot ignore padding refuses the step on all ranks
        note_padding(pipeline_of(model).module)
    if samples is not None:
        samples.compare(sums)
    return called, _total(sums, count if counts else 0, manager)


def _called(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    terms: Terms,
    own_loss: OwnLoss | None,
    trains: bool,
) -> list[Called]:
    """Return the micro-batches as the model is called with them; raise if one does not fit."""
    if own_loss is not None:
        own_loss.require_functions()
    first = TOKENS
    if micro_batches and isinstance(micro_batches[0], Mapping):
        first = first_entry(micro_batches[0], terms.arguments, terms.name)
    batches = read(micro_batches, with_labels=own_loss is None and trains, first=first)
    if trains:
        if terms.has_batch_norms:
            require_whole_batches(model, len(batches), manager, terms)
        if terms.counts_routing and any(map(counts_nothing, batches)):
            raise InvalidArgumentError(
                "a micro-batch has no row, and count_routing would count the tokens of the made-up "
                "row in its place: take fewer micro-batches, or more rows"
            )
        model.wrapped.refuse_others(model.module)
    pipeline = pipeline_of(model)
    pipeline.check_ties()
    called = [as_called(batch, terms) for batch in batches]
    if manager.cp_size > 1:
        _note_layouts(pipeline.module, batches, terms)
        for batch in called if terms.is_pretrained else ():
            require_computable(pipeline.module, batch)
    return called


def _note_layouts(module: nn.Module, batches: Sequence[Batch], terms: Terms) -> None:
    """Record the layouts of sequences of all micro-batches, which may have padding over cp."""
    cuts = [batch.cut.sequences for batch in batches if isinstance(batch, MicroBatch)]
    layouts = [sequences.layout for sequences in cuts if sequences is not None]
    if terms.counts_routing and len({layout.length for layout in layouts}) > 1:
        raise InvalidArgumentError(
            "the micro-batches have sequences of several lengths, and count_routing takes the "
            "padding of the first for that of all: cut them from one global batch"
        )
    if layouts:  # batches may have been sharded for another model since then
        note_shards(module, layouts)


def _has_padding(batch: Batch) -> bool:
    sequences = batch.cut.sequences if isinstance(batch, MicroBatch) else None
    return sequences is not None and sequences.layout.padded_length > sequences.layout.length


def as_called(batch: Batch, terms: Terms) -> Called:
    """Return the entries that the model is called with; `input_ids` is its first argument."""
    cut = batch.cut if isinstance(batch, MicroBatch) else None
    if cut is not None and terms.cp_layout not in (None, cut.layout):
        raise InvalidArgumentError(
            f"this batch was cut in a {cut.layout} layout, and the model attends in a "
            f"{terms.cp_layout} one: call shard_global_batch(..., model=model)"
        )
    entries: dict[str, Any] = {n: x for n, x in batch.items() if not n.startswith(OF_LOSS)}
    entries[TOKENS] = entries.pop(first_entry(batch, terms.arguments, terms.name))
    if terms.keeps_cache:  # useless in training, and recomputation would add to the cache twice
        entries.setdefault("use_cache", False)
    given = POSITIONS in entries and not (cut is not None and cut.counted)
    if terms.counting is not None and not given:
        raise InvalidArgumentError(_OTHERWISE.format(terms.name))
    if not given and not terms.takes(POSITIONS):
        entries.pop(POSITIONS, None)  # the first step checks whether the model counts them itself
    strangers = [name for name in entries if name not in (TOKENS, LABELS) and not terms.takes(name)]
    if strangers:
        raise InvalidArgumentError(
            f"the batch has {', '.join(strangers)}, and the forward of {terms.name} takes no "
            f"argument of that name, only {', '.join(terms.arguments)}; leave it out of the batch, "
            f"or let forward take it; entries for a loss_fn alone have names {OF_LOSS}..."
        )
    needed = terms.arguments.get(POSITIONS) or (terms.needs_positions and terms.takes(POSITIONS))
    if needed and POSITIONS not in entries and sequence_shape(batch) is not None:
        ids = entries[TOKENS]
        entries[POSITIONS] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return Called(entries, batch)


def _total(
    sums: Mapping[str, float], count: float | Tensor, manager: ProcessGroupManager
) -> Number:
    """Return the count of all ranks; a 0-d tensor if any of them counts on an accelerator."""
    total = int(sums["count"]) if sums["count"].is_integer() else sums["count"]
    if not sums["on device"]:
        return total
    counts = torch.zeros((), dtype=torch.int64, device=get_comm_device(manager.world_group))
    if isinstance(count, Tensor):
        counts += count
    all_reduce(counts, group=manager.world_group)
    return counts + total


def _counted(
    called: Sequence[Called], model: DataParallelBucket, own_loss: OwnLoss | None
) -> float | Tensor:
    """Return the count of all micro-batches, and record each; 0 on ranks that compute no loss."""
    if own_loss is not None and own_loss.counts_later and has_gradients(model):
        own_loss.counts_later = False  # a later correction would scale older gradients too
    computes = pipeline_of(model).is_last_stage
    for batch in called if own_loss is None or computes else ():
        if own_loss is None:
            batch.count = token_count(batch)
        elif own_loss.counts_later:
            batch.count = size_of(batch)
        else:
            batch.count = own_loss.count(batch.micro_batch)
    return sum(batch.count for batch in called)


def has_gradients(model: DataParallelBucket) -> bool:
    """Return whether any parameter or shard that this rank's optimizers update has a gradient."""
    return any(shard.tensor.grad is not None for shard in parameter_shards(model))


def _require_agreement(
    sums: Mapping[str, float], manager: ProcessGroupManager, *, alone: bool, has_own: bool
) -> None:
    """Raise if only some ranks are within `no_sync`, have a loss_fn, or count losses later."""
    if 0 < sums["alone"] < manager.world_size:
        line = f"gradients {'stay on this rank (no_sync)' if alone else 'are summed over ranks'}"
        agree("no_sync(), which all enter and leave alike", [line], manager.world_group)
    if 0 < sums["own loss"] < manager.world_size:
        line = "a loss_fn of its own" if has_own else "the loss of tokens"
        agree("the loss, which has the same function everywhere", [line], manager.world_group)
    if 0 < sums["counts later"] < manager.world_size:
        raise InvalidArgumentError(
            f"{describe_rank()}: some ranks have gradients of earlier steps and others have none, "
            "so that losses must be counted before the step: pass train_step(..., count_fn=), a "
            "function of the micro-batch that returns their number"
        )

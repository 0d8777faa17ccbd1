"""Make a small batch from a step's own rows, as micro-batches and as a batch of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import all_gather_object
from ...parallel.context_parallel import ShardedSequences
from ...parallel.context_parallel.building import CU_SEQLENS
from ...parallel.data_parallel.building import NARROW
from ...parallel.pg_manager import IGNORED, ProcessGroupManager
from ..batches import Batch, Called, Cut, MicroBatch, rows_of_ranks, shard_global_batch
from ..entries import OF_LOSS, POSITIONS, row_count, sequence_shape
from ..forward import Terms
from ..one_process import OneProcess
from ..preparation import as_called

ROWS, LENGTH, TOKENS = 2, 512, 8192  # at most: rows per micro-batch, positions per row, tokens
_SHARE, _FEW = 2, 64  # take 1 in 2 of a rank's tokens in the step, but at least 64 per row


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """Some rows of a step, with fewer positions."""

    micro_batches: list[Batch]  # this rank's
    called: Called  # the whole batch, as the model of one process is called with it
    alone: OneProcess
    is_short: bool  # the step has more positions
    rows: int  # over all ranks
    sequences: ShardedSequences | None  # this rank's positions, if they are known


def entries_added(micro_batches: Sequence[Batch]) -> set[str] | None:
    """Return the entries added after `shard_global_batch`; None if unknown or for the model."""
    cuts = [batch.cut for batch in micro_batches if isinstance(batch, MicroBatch)]
    if len(cuts) < len(micro_batches) or not cuts:
        return None
    known = cuts[0].whole.keys() | {POSITIONS}
    added = {name for batch in micro_batches for name in batch.keys() - known}
    of_loss = "labels" in cuts[0].whole and all(name.startswith(OF_LOSS) for name in added)
    return added if of_loss or not added else None


def small_batch(
    micro_batches: Sequence[Batch],
    model: nn.Module,
    terms: Terms,
    manager: ProcessGroupManager,
    *,
    shortens: bool,
    wide: bool,
) -> SmallBatch:
    """Return a small batch of a step's rows, perhaps with few positions, or `wide`: in float32."""
    cut, count = cast(MicroBatch, micro_batches[0]).cut, len(micro_batches)
    kept = count if manager.pp_size > 1 else min(count, 2)
    whole = _rows_of(cut, count, kept, manager)
    if not cut.own:
        whole = _unequal(whole, cut.whole)
    if wide:
        whole = {n: x.float() if is_narrow(x) else x for n, x in whole.items()}
    short, shape = whole, sequence_shape(cut.whole)
    if shortens and shape is not None:
        ranks = 1 if cut.own else manager.dp_size
        tokens = shape[0] * shape[1] // (ranks * manager.cp_size)
        short = _short(whole, shape[1], min(TOKENS, tokens // _SHARE), manager)
        labels = short.get("labels")
        if isinstance(labels, Tensor) and not bool((labels != IGNORED).any()):
            short = whole  # no position would count in the loss
    told = cut.row_dims
    again = partial(shard_global_batch, short, row_dims=told, sequence_dims=cut.sequence_dims)
    own = again(kept, model=model)
    alone = OneProcess(_group_of_one(manager))
    (plain,) = again(1, cast(Any, alone))
    of_one = replace(terms, cp_layout=None, needs_positions=False, counting=None)
    sequences = cast(MicroBatch, own[0]).cut.sequences
    called, rows = as_called(plain, of_one), row_count(short, told)
    return SmallBatch(own, called, alone, short is not whole, rows, sequences)


def _unequal(few: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Give the first row fewer labels if a step lacks any, so that losses must not count rows."""
    labels, every = few.get("labels"), whole.get("labels")
    if not isinstance(labels, Tensor) or not isinstance(every, Tensor) or labels.ndim != 2:
        return few
    counted = (labels[0] != IGNORED).nonzero().flatten()
    if len(counted) < 2 or not bool((every == IGNORED).any()):
        return few
    labels = labels.clone()
    labels[0, counted[len(counted) // 2 :]] = IGNORED
    return {**few, "labels": labels}


def _rows_of(cut: Cut, count: int, kept: int, manager: ProcessGroupManager) -> dict[str, Any]:
    """Return the first rows of the first micro-batches of each data-parallel rank, joined."""
    ranks = 1 if cut.own else manager.dp_size
    few = [
        row
        for shares in rows_of_ranks(row_count(cut.whole, cut.row_dims), ranks, count)
        for share in shares[:kept]
        for row in share[:ROWS]
    ]
    picked = {
        name: x if cut.row_dims.get(name) is None else _pick(x, cut.row_dims[name] or 0, few)
        for name, x in cut.whole.items()
    }
    dims = {name: dim for name, dim in cut.row_dims.items() if dim is not None}
    if cut.own and manager.dp_size > 1:
        shown = {n: on_device(x, "cpu") for n, x in picked.items()}
        everyone = all_gather_object(shown, manager.dp_group)
        for name, dim in dims.items():
            own = cut.whole[name]
            picked[name] = torch.cat([each[name] for each in everyone], dim).to(own.device)
    # Repeat rows until every micro-batch has the same number.
    have, shares = row_count(picked, cut.row_dims), manager.dp_size * kept
    filled = [index % have for index in range(-(-have // shares) * shares)]
    return picked | {name: _pick(picked[name], dim, filled) for name, dim in dims.items()}


def is_narrow(x: Any) -> bool:
    """Return whether this is a 16-bit tensor."""
    return isinstance(x, Tensor) and x.dtype in NARROW


def _pick(x: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    return x.index_select(dim, torch.tensor(rows, device=x.device))


def on_device(x: Any, device: torch.device | str) -> Any:
    """Return a tensor on a device, anything else as it is."""
    return x.to(device) if isinstance(x, Tensor) else x


def _short(
    whole: dict[str, Any], length: int, tokens: int, manager: ProcessGroupManager
) -> dict[str, Any]:
    """Return a batch cut to its first positions; the whole batch if an entry is unclear."""
    unit = 2 * manager.cp_size * manager.tp_size
    wanted = max(min(LENGTH, tokens // len(whole["input_ids"])), _FEW)
    units = max(wanted // unit, 2)
    # If possible, divide the length: then a model's blocks of positions end at ranks' borders only
    # if those of the step do.
    fits = (n for n in range(units, max(units // 2, 2) - 1, -1) if length % (n * unit) == 0)
    most = next(fits, units) * unit
    if length <= most:
        return whole
    short, shape = dict(whole), whole["input_ids"].shape
    for name, x in whole.items():
        if not isinstance(x, Tensor):
            continue
        if name in CU_SEQLENS:
            short[name] = torch.cat([x[x < most], x.new_tensor([most])])
        elif x.ndim > 1 and x.shape[-1] == length and (x.shape == shape or name == POSITIONS):
            short[name] = x[..., :most]
        elif length in x.shape:
            return whole  # this entry, perhaps a mask, may have positions in any dim
    return short


def _group_of_one(manager: ProcessGroupManager) -> ProcessGroup | None:
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        if getattr(manager, f"{axis}_size") == 1:
            return cast(ProcessGroup | None, getattr(manager, f"{axis}_group"))
    ranks = [manager.global_rank]
    group: ProcessGroup = torch.distributed.new_group(ranks, use_local_synchronization=True)
    return group

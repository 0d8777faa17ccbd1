"""Asking a model, in its first step, whether it mixes the positions of a divided sequence.

Context parallelism makes attention right. All else has to compute each position from that position
alone. So the first micro-batch runs forward twice, with attention in which each position sees
itself: as it is, and with the second half of its positions moved to the front and the first half
gone. The output must have moved too. A convolution, a recurrence, pooling, a cumulative sum, or
positions that a model counts itself come out otherwise.

It costs two forwards of one micro-batch without attention, once, and compares nothing that ranks
have to exchange.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from ...dist import all_gather_object, get_rank
from ...dist.building import agree, tensors_in
from ...dist.errors import InvalidArgumentError
from ...parallel.context_parallel.building import (
    Calls,
    apart,
    asked,
    each_alone,
    find_suspect,
    looking,
)
from ...parallel.pg_manager import ProcessGroupManager
from ...parallel.pipeline_parallel import PipelineParallel, pipeline_forward
from ...parallel.pipeline_parallel.building import stands
from ..batches import Batch, Called, MicroBatch
from ..forward import pipeline_of
from ..row_dims import POSITIONS

_SUBJECT = "asking the model whether it mixes positions"


def require_apart(model: nn.Module, batch: Batch, manager: ProcessGroupManager) -> bool:
    """Refuse a model that mixes the positions of a divided sequence outside of attention.

    Every rank calls it, with its own micro-batch.

    Args:
        model: What `parallelize` returned.
        batch: The first micro-batch, as the model is called with it.
        manager: The grid.

    Returns:
        Whether the answer holds; not if ranks have one position each, which a warning says.

    Raises:
        InvalidArgumentError: It does, or returns nothing that has positions; on every rank, with
            the module that does it.
        MismatchError: Another rank's forward raised; the message has its error.
    """
    length = batch["input_ids"].shape[1]
    shift = _shift(length)
    pipeline = pipeline_of(model)
    if not shift:  # one position a rank, on every rank: there is nothing to move
        if get_rank() == 0:
            _warn_of_one_position(pipeline, manager)
        asked(pipeline.module)  # it would say the same
        return False
    batch = _varied(batch)
    mixes, failed = False, list[Exception]()
    try:
        mixes = _differ(_run(pipeline, [batch, _moved(batch, shift)]), shift, batch)
    except Exception as found:  # the other ranks must learn of it
        failed.append(found)
    # Taken out of the list, since its traceback has this frame.
    notes = agree(
        _SUBJECT, [], manager.world_group, error=failed.pop() if failed else None, note=int(mixes)
    )
    if any(notes):
        _refuse(pipeline, batch, shift, manager)
    asked(pipeline.module)  # its own first forward needs not ask again
    return True


def _warn_of_one_position(pipeline: PipelineParallel, manager: ProcessGroupManager) -> None:
    warnings.warn(
        f"each rank has one position, since cp_size={manager.cp_size} divides sequences of "
        f"{manager.cp_size}: it cannot be told whether {type(pipeline.module).__name__} mixes "
        "positions outside of attention, or counts them itself; train the first step on longer "
        "sequences",
        RuntimeWarning,
        stacklevel=2,
    )


def _varied(batch: Batch) -> Batch:
    """Return a batch with two kinds of tokens, if all are the same: nothing else would show."""
    ids = batch["input_ids"]
    first = ids.flatten()[:1]
    if not bool((ids == first).all()):
        return batch
    other = torch.where(first > 0, first - 1, first + 1)
    places = torch.arange(ids.shape[1], device=ids.device)
    odd = ((places + 1) ** 2 // 3) % 2 == 1  # at no regular distance
    shape = (1, -1, *[1] * (ids.ndim - 2))
    return {**batch, "input_ids": torch.where(odd.view(shape), other, ids)}


def _shift(length: int) -> int:
    """Return by how many positions to move: about half of them, by no multiple of a block's size.

    A layer that mixes within aligned blocks alone would move as they do; so it is a prime number
    that does not divide the length.
    """
    primes = (n for n in range(length // 2, 2, -1) if all(n % d for d in range(2, isqrt(n) + 1)))
    return next((n for n in primes if length % n), min(length // 2, 1))


def _moved(batch: Batch, shift: int) -> Batch:
    """Return a batch that begins at position `shift`, and goes on with the same ones again."""
    length = batch["input_ids"].shape[1]
    places = torch.arange(length).add_(shift)
    places = torch.where(places < length, places, places - length + shift)
    return {
        name: x if dim is None else x.index_select(dim, places.to(x.device))
        for name, x, _, dim in _with_dims(batch)
    }


def _first_row(batch: Batch) -> Batch:
    return {n: x if dim is None else x.narrow(dim, 0, 1) for n, x, dim, _ in _with_dims(batch)}


def _with_dims(batch: Batch) -> Iterator[tuple[str, Any, int | None, int | None]]:
    """Yield the entries of a micro-batch with their dims of rows and of positions, if any."""
    made = batch.micro_batch if isinstance(batch, Called) else batch
    told = made.cut.row_dims if isinstance(made, MicroBatch) else {}
    shape = batch["input_ids"].shape
    for name, x in batch.items():
        spread = isinstance(x, Tensor) and x.shape[:2] == shape
        row: int | None = told.get(name, 0 if spread else None)
        position = 1 if spread and row == 0 else None
        if name == POSITIONS and isinstance(x, Tensor):
            row = x.ndim - 2 if x.shape[-2] == shape[0] else None
            position = x.ndim - 1
        yield name, x, row, position


def _run(pipeline: PipelineParallel, batches: list[Batch]) -> list[Any]:
    """Run forwards with each position alone; return outputs, none without the last stage."""
    with each_alone() as run, looking(pipeline.module):
        outputs = pipeline_forward(pipeline, batches, each=_tensors)
    if run.error is not None:
        raise run.error
    return outputs


def _tensors(output: Any, batch: Any) -> Any:
    """Return all tensors of an output."""
    return [*tensors_in(output)] or [*tensors_in(getattr(output, "__dict__", {}))]


def _differ(outputs: list[Any], shift: int, batch: Batch) -> bool:
    """Return whether outputs [B, L, ...] did not move with their inputs, or there are none."""
    if not outputs:
        return False
    shape = batch["input_ids"].shape[:2]
    before, after = ([x for x in each if x.shape[:2] == shape] for each in outputs)
    kept = shape[1] - shift
    moved = (not apart(a[:, shift:], b[:, :kept]) for a, b in zip(before, after, strict=False))
    return not before or len(before) != len(after) or not all(moved)


def _refuse(
    pipeline: PipelineParallel, batch: Batch, shift: int, manager: ProcessGroupManager
) -> None:
    """Run again, one row and writing down what each module computes; raise on every rank.

    Raises:
        InvalidArgumentError: Always, unless the model draws random numbers in eval mode: nothing
            can be told then, and a warning says so.
    """
    row = _first_row(batch)
    with Calls(pipeline.module) as calls:
        outputs = _run(pipeline, [row, row, _moved(row, shift)])
    drawn = bool(outputs) and any(map(apart, outputs[0], outputs[1]))
    moves = partial(_moves, row["input_ids"].shape[1], shift)
    found = manager.pp_rank, find_suspect(calls, moves), drawn
    everyone = all_gather_object(found, manager.world_group)
    if any(random for *_, random in everyone):
        warnings.warn(
            "this model draws random numbers in eval mode, so that it cannot be told whether it "
            "mixes the positions of divided sequences",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    suspects = [text for _, text, _ in sorted(everyone, key=lambda entry: entry[0]) if text]
    where = suspects[0] if suspects else "the model's own code"
    raise InvalidArgumentError(
        f"cp_size={manager.cp_size} divides every sequence over ranks, and {where} computes a "
        "position from others than itself, or from its place on this rank: a convolution, a "
        "recurrence, pooling, a cumulative sum, or positions that the model counts itself "
        "(torch.arange). On a part of the sequence that is not what one process computes. Take "
        "positions from the forward's argument position_ids, and mix positions by "
        "F.scaled_dot_product_attention alone; or train this model with cp_size=1"
    )


def _moves(length: int, shift: int, a: Tensor, b: Tensor) -> bool:
    """Return whether a tensor with a dim of positions moved with them; others are not asked."""
    dims = [dim for dim, size in enumerate(a.shape) if size == length]
    if a.shape != b.shape or not dims or stands(a) or stands(b):  # other stages have their values
        return True
    kept = length - shift
    return any(not apart(a.narrow(dim, shift, kept), b.narrow(dim, 0, kept)) for dim in dims)

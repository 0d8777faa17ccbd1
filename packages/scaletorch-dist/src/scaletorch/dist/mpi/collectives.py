"""Collectives over MPI: each starts MPI's non-blocking calls and says what remains after them.

Movement is of bytes, so that every dtype travels. Roots are ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from .memory import bring_home, flat, raw, reduce_op, reduced, reducible, typed
from .progress import Call

Finish = Callable[[], None]


def _one_after_another(finishes: Sequence[Finish]) -> Finish:
    def finish() -> None:
        for step in finishes:
            step()

    return finish


def broadcast(mpi: Any, comm: Any, data: Tensor, root: int) -> Call:
    """Copy `data` of the root into that of every rank."""
    content = flat(data)
    request = comm.Ibcast(raw(mpi, content), root=root)
    return Call("broadcast", [request], [data], partial(bring_home, data, content), content)


def all_reduce(mpi: Any, comm: Any, tensors: Sequence[Tensor], op: Any) -> Call:
    """Reduce each tensor over the ranks, in place."""
    requests, finishes = [], []
    for data in tensors:
        kind, name = reduce_op(mpi, op, data.dtype)
        content = reducible(flat(data))
        requests.append(comm.Iallreduce(mpi.IN_PLACE, typed(mpi, content), op=kind))
        finishes.append(reduced(data, content, name, comm.size))
    return Call("all_reduce", requests, list(tensors), _one_after_another(finishes))


def reduce(mpi: Any, comm: Any, data: Tensor, op: Any, root: int) -> Call:
    """Reduce `data` over the ranks, in place on the root; other ranks keep theirs."""
    kind, name = reduce_op(mpi, op, data.dtype)
    content = reducible(flat(data))
    if comm.rank != root:
        request = comm.Ireduce(typed(mpi, content), None, op=kind, root=root)
        return Call("reduce", [request], [data], keep=content)
    request = comm.Ireduce(mpi.IN_PLACE, typed(mpi, content), op=kind, root=root)
    return Call("reduce", [request], [data], reduced(data, content, name, comm.size), content)


def all_gather(
    mpi: Any, comm: Any, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]
) -> Call:
    """Collect every rank's `inputs[i]` in the list `outputs[i]`; ranks' sizes may differ."""
    requests, finishes = [], []
    for parts, data in zip(outputs, inputs, strict=True):
        _check_count(parts, comm.size, "all_gather")
        content, received, pieces = flat(data), *_buffer(parts, data)
        counts = _byte_counts(parts)
        described = [raw(mpi, received)[0], counts, _starts(counts), mpi.BYTE]
        requests.append(comm.Iallgatherv(raw(mpi, content), described))
        finishes.append(partial(_spread, parts, pieces, content))
    flattened = [part for parts in outputs for part in parts]
    return Call("all_gather", requests, flattened, _one_after_another(finishes))


def all_gather_single(
    mpi: Any, comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Call:
    """Collect every rank's `inputs[i]`, joined in `outputs[i]`."""
    requests, finishes = [], []
    for output, data in zip(outputs, inputs, strict=True):
        if output.numel() != data.numel() * comm.size or output.dtype != data.dtype:
            raise InvalidArgumentError(
                f"all_gather of {tuple(data.shape)} {data.dtype} over {comm.size} ranks does not "
                f"fit an output of {tuple(output.shape)} {output.dtype}"
            )
        content, received = flat(data), flat(output)
        requests.append(comm.Iallgather(raw(mpi, content), raw(mpi, received, comm.size)))
        finishes.append(partial(_home, output, received, content))
    return Call("all_gather", requests, list(outputs), _one_after_another(finishes))


def gather(mpi: Any, comm: Any, parts: Sequence[Tensor], data: Tensor, root: int) -> Call:
    """Collect every rank's tensor in the root's list."""
    content = flat(data)
    if comm.rank != root:
        request = comm.Igather(raw(mpi, content), None, root=root)
        return Call("gather", [request], [], keep=content)
    _check_count(parts, comm.size, "gather")
    received, pieces = _buffer(parts, data)
    request = comm.Igather(raw(mpi, content), raw(mpi, received, comm.size), root=root)
    return Call("gather", [request], list(parts), partial(_spread, parts, pieces, content))


def scatter(mpi: Any, comm: Any, output: Tensor, parts: Sequence[Tensor], root: int) -> Call:
    """Fill every rank's `output` with its entry of the root's list."""
    received, content = flat(output), None
    if comm.rank == root:
        _check_count(parts, comm.size, "scatter")
        content = torch.cat([flat(part) for part in parts])
    sent = None if content is None else raw(mpi, content, comm.size)
    request = comm.Iscatter(sent, raw(mpi, received), root=root)
    return Call("scatter", [request], [output], partial(_home, output, received, content))


def reduce_scatter(
    mpi: Any, comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Any
) -> Call:
    """Reduce entry r of each rank's `inputs[i]` into `outputs[i]` of rank r; sizes may differ."""
    requests, finishes = [], []
    for output, parts in zip(outputs, inputs, strict=True):
        _check_count(parts, comm.size, "reduce_scatter")
        kind, name = reduce_op(mpi, op, output.dtype)
        content = reducible(torch.cat([flat(part) for part in parts]))
        scale = 2 if output.is_complex() else 1
        counts = [part.numel() * scale for part in parts]
        received = content.new_empty(counts[comm.rank])
        requests.append(
            comm.Ireduce_scatter(typed(mpi, content), typed(mpi, received), counts, op=kind)
        )
        finishes.append(partial(_after, reduced(output, received, name, comm.size), content))
    return Call("reduce_scatter", requests, list(outputs), _one_after_another(finishes))


def all_to_all(mpi: Any, comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    """Send `inputs[r]` to rank r, and fill `outputs[r]` from it."""
    _check_count(outputs, comm.size, "all_to_all")
    _check_count(inputs, comm.size, "all_to_all")
    content = torch.cat([flat(part).view(torch.uint8) for part in inputs])
    received = content.new_empty(sum(_byte_counts(outputs)))
    request = _exchange(mpi, comm, received, _byte_counts(outputs), content, _byte_counts(inputs))
    pieces = list(received.split(_byte_counts(outputs)))
    views = [piece.view(part.dtype) for piece, part in zip(pieces, outputs, strict=True)]
    return Call("all_to_all", [request], list(outputs), partial(_spread, outputs, views, content))


def all_to_all_single(
    mpi: Any,
    comm: Any,
    output: Tensor,
    data: Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
) -> Call:
    """Send rank r its rows of `data`, and join what comes in `output`."""
    content, received = flat(data), flat(output)
    sent = _row_counts(data, input_sizes, comm.size, "input")
    comes = _row_counts(output, output_sizes, comm.size, "output")
    request = _exchange(mpi, comm, received, comes, content, sent)
    finish = partial(_home, output, received, content)
    return Call("all_to_all", [request], [output], finish)


def barrier(mpi: Any, comm: Any) -> Call:
    """Wait for one another."""
    return Call("barrier", [comm.Ibarrier()], [])


def _exchange(
    mpi: Any, comm: Any, received: Tensor, comes: list[int], content: Tensor, sent: list[int]
) -> Any:
    return comm.Ialltoallv(
        [raw(mpi, content)[0], sent, _starts(sent), mpi.BYTE],
        [raw(mpi, received)[0], comes, _starts(comes), mpi.BYTE],
    )


def _row_counts(data: Tensor, sizes: Sequence[int], ranks: int, name: str) -> list[int]:
    """Return the bytes for each rank, from its rows or in equal parts."""
    rows = data.shape[0] if data.dim() else 0
    if not sizes and rows % ranks:
        raise InvalidArgumentError(f"all_to_all: {ranks} ranks do not divide {name} dim 0, {rows}")
    if sizes and (len(sizes) != ranks or sum(sizes) != rows):
        raise InvalidArgumentError(
            f"all_to_all: {name} sizes {list(sizes)} are not {rows} rows for {ranks} ranks"
        )
    row = data.numel() // rows * data.element_size() if rows else 0
    return [size * row for size in sizes or [rows // ranks] * ranks]


def _buffer(parts: Sequence[Tensor], data: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return memory for all parts, and its pieces."""
    counts = [part.numel() for part in parts]
    memory = data.new_empty(sum(counts))
    return memory, list(memory.split(counts))


def _byte_counts(parts: Sequence[Tensor]) -> list[int]:
    return [part.numel() * part.element_size() for part in parts]


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _check_count(parts: Sequence[Tensor], size: int, call: str) -> None:
    if len(parts) != size:
        raise InvalidArgumentError(f"{call} needs {size} tensors, one a rank, got {len(parts)}")


def _spread(parts: Sequence[Tensor], pieces: Sequence[Tensor], keep: Tensor) -> None:
    for part, piece in zip(parts, pieces, strict=True):
        bring_home(part, piece)


def _home(output: Tensor, received: Tensor, keep: Any) -> None:
    bring_home(output, received)


def _after(finish: Finish, keep: Tensor) -> None:
    finish()

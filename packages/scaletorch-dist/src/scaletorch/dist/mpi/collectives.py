"""Collectives over MPI: each starts a non-blocking MPI call and returns it with its completion.

MPI gets tensors as raw memory. Calls that only move data send bytes, so every dtype works. Roots
are ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from ..wire.backend import as_real
from ..wire.recipes import Recipe, op_name, recipe_for
from ..wire.sums import sum_dtype
from .handles import Call

# Names in mpi4py.MPI of the dtypes that MPI reduces, and of its operations.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX",
        "band": "BAND", "bor": "BOR", "bxor": "BXOR"}  # fmt: skip
MOST = 2**31 - 1  # elements that every MPI can count


def flat(data: Tensor) -> Tensor:
    """Return a tensor flat and contiguous; copy only if necessary."""
    if not data.is_cpu:
        raise InvalidArgumentError(
            f"backend 'mpi4py' moves CPU tensors, not {data.device.type}: copy it to the CPU, or "
            "use scaletorch.dist's calls, which do"
        )
    if data.layout is not torch.strided or data.is_quantized:
        raise InvalidArgumentError("backend 'mpi4py' moves dense tensors only")
    return data.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def raw(mpi: Any, data: Tensor, shards: int = 1) -> list[Any]:
    """Describe a flat tensor's bytes to MPI: memory, count of one of the shards, and type."""
    size = data.numel() * data.element_size()
    memory, count = mpi.buffer.fromaddress(data.data_ptr(), size), size // shards
    if count > MOST and count % 8 == 0:  # Open MPI 5 has 32-bit counts
        return [memory, count // 8, mpi.INT64_T]
    return [memory, count, mpi.BYTE]


def typed(mpi: Any, data: Tensor) -> list[Any]:
    """Describe a flat packed tensor's elements to MPI."""
    numbers = as_real(data)
    size = numbers.numel() * numbers.element_size()
    kind = getattr(mpi, _TYPES[numbers.dtype])
    return [mpi.buffer.fromaddress(numbers.data_ptr(), size), numbers.numel(), kind]


def pack(mpi: Any, data: Tensor, op: Any) -> tuple[Tensor, Recipe, Any]:
    """Pack a flat tensor for a reduction; return it, its recipe, and MPI's operation."""
    recipe = recipe_for(op_name(op), data.dtype)
    packed = recipe.pack(data)
    packed = packed.to(sum_dtype(packed.dtype))  # MPI has no 16-bit floats
    return packed, recipe, getattr(mpi, _OPS[recipe.run])


def unpack(target: Tensor, packed: Tensor, recipe: Recipe, size: int) -> None:
    """Unpack a tensor that was reduced over `size` ranks into `target`."""
    bring_home(target, recipe.unpack(packed, size))


def bring_home(target: Tensor, source: Tensor) -> None:
    """Copy a flat tensor into `target` unless they share memory."""
    if source.data_ptr() != target.data_ptr():
        target.detach().copy_(source.view(target.shape))


def broadcast(mpi: Any, comm: Any, data: Tensor, root: int) -> Call:
    """Copy `data` of the root into `data` of every rank."""
    content = flat(data)
    request = comm.Ibcast(raw(mpi, content), root=root)
    return Call("broadcast", [request], [data], partial(bring_home, data, content), content)


def all_reduce(mpi: Any, comm: Any, data: Tensor, op: Any) -> Call:
    """Reduce `data` over the ranks, in place."""
    content, recipe, kind = pack(mpi, flat(data), op)
    request = comm.Iallreduce(mpi.IN_PLACE, typed(mpi, content), op=kind)
    finish = partial(unpack, data, content, recipe, comm.size)
    return Call("all_reduce", [request], [data], finish, content)


def reduce(mpi: Any, comm: Any, data: Tensor, op: Any, root: int) -> Call:
    """Reduce `data` over the ranks, in place on the root; other ranks keep their `data`."""
    content, recipe, kind = pack(mpi, flat(data), op)
    if comm.rank != root:
        request = comm.Ireduce(typed(mpi, content), None, op=kind, root=root)
        return Call("reduce", [request], [data], keep=content)
    request = comm.Ireduce(mpi.IN_PLACE, typed(mpi, content), op=kind, root=root)
    finish = partial(unpack, data, content, recipe, comm.size)
    return Call("reduce", [request], [data], finish, content)


def all_gather(mpi: Any, comm: Any, shards: Sequence[Tensor], data: Tensor) -> Call:
    """All-gather every rank's tensor into a list; sizes may differ."""
    _check_count(shards, comm.size, "all_gather")
    content, received, pieces = flat(data), *_buffer(shards, data)
    counts = _byte_counts(shards)
    described = [raw(mpi, received)[0], counts, _starts(counts), mpi.BYTE]
    request = comm.Iallgatherv(raw(mpi, content), described)
    return Call("all_gather", [request], list(shards), partial(_spread, shards, pieces), content)


def all_gather_single(mpi: Any, comm: Any, output: Tensor, data: Tensor) -> Call:
    """All-gather every rank's tensor into `output`, joined."""
    if output.numel() != data.numel() * comm.size or output.dtype != data.dtype:
        raise InvalidArgumentError(
            f"all_gather of {tuple(data.shape)} {data.dtype} over {comm.size} ranks does not "
            f"fit an output of {tuple(output.shape)} {output.dtype}"
        )
    content, received = flat(data), flat(output)
    request = comm.Iallgather(raw(mpi, content), raw(mpi, received, comm.size))
    finish = partial(bring_home, output, received)
    return Call("all_gather", [request], [output], finish, content)


def gather(mpi: Any, comm: Any, shards: Sequence[Tensor], data: Tensor, root: int) -> Call:
    """Gather every rank's tensor into the root's list."""
    content = flat(data)
    if comm.rank != root:
        request = comm.Igather(raw(mpi, content), None, root=root)
        return Call("gather", [request], [], keep=content)
    _check_count(shards, comm.size, "gather")
    received, pieces = _buffer(shards, data)
    request = comm.Igather(raw(mpi, content), raw(mpi, received, comm.size), root=root)
    return Call("gather", [request], list(shards), partial(_spread, shards, pieces), content)


def scatter(mpi: Any, comm: Any, output: Tensor, shards: Sequence[Tensor], root: int) -> Call:
    """Fill every rank's `output` with its entry of the root's list."""
    received, content = flat(output), None
    if comm.rank == root:
        _check_count(shards, comm.size, "scatter")
        content = torch.cat([flat(shard) for shard in shards])
    sent = None if content is None else raw(mpi, content, comm.size)
    request = comm.Iscatter(sent, raw(mpi, received), root=root)
    return Call("scatter", [request], [output], partial(bring_home, output, received), content)


def reduce_scatter(mpi: Any, comm: Any, output: Tensor, shards: Sequence[Tensor], op: Any) -> Call:
    """Reduce entry r of each rank's list into `output` of rank r; sizes may differ."""
    _check_count(shards, comm.size, "reduce_scatter")
    content, recipe, kind = pack(mpi, torch.cat([flat(shard) for shard in shards]), op)
    scale = 2 if content.is_complex() else 1
    counts = [shard.numel() * scale for shard in shards]
    received = content.new_empty(shards[comm.rank].numel())
    request = comm.Ireduce_scatter(typed(mpi, content), typed(mpi, received), counts, op=kind)
    finish = partial(unpack, output, received, recipe, comm.size)
    return Call("reduce_scatter", [request], [output], finish, content)


def all_to_all(mpi: Any, comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    """Send `inputs[r]` to rank r, and fill `outputs[r]` from rank r."""
    _check_count(outputs, comm.size, "all_to_all")
    _check_count(inputs, comm.size, "all_to_all")
    content = torch.cat([flat(shard).view(torch.uint8) for shard in inputs])
    received = content.new_empty(sum(_byte_counts(outputs)))
    request = _exchange(mpi, comm, received, _byte_counts(outputs), content, _byte_counts(inputs))
    pieces = list(received.split(_byte_counts(outputs)))
    views = [piece.view(shard.dtype) for piece, shard in zip(pieces, outputs, strict=True)]
    return Call("all_to_all", [request], list(outputs), partial(_spread, outputs, views), content)


def all_to_all_single(
    mpi: Any,
    comm: Any,
    output: Tensor,
    data: Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
) -> Call:
    """Send rank r its rows of `data`, and receive the ranks' rows joined in `output`."""
    content, received = flat(data), flat(output)
    sent = _row_counts(data, input_sizes, comm.size, "input")
    comes = _row_counts(output, output_sizes, comm.size, "output")
    request = _exchange(mpi, comm, received, comes, content, sent)
    finish = partial(bring_home, output, received)
    return Call("all_to_all", [request], [output], finish, content)


def barrier(mpi: Any, comm: Any) -> Call:
    """Wait until every rank has called this."""
    return Call("barrier", [comm.Ibarrier()], [])


def _exchange(
    mpi: Any, comm: Any, received: Tensor, comes: list[int], content: Tensor, sent: list[int]
) -> Any:
    return comm.Ialltoallv(
        [raw(mpi, content)[0], sent, _starts(sent), mpi.BYTE],
        [raw(mpi, received)[0], comes, _starts(comes), mpi.BYTE],
    )


def _row_counts(data: Tensor, sizes: Sequence[int], ranks: int, name: str) -> list[int]:
    """Return the bytes for each rank, by `sizes` in rows or in equal shares."""
    rows = data.shape[0] if data.dim() else 0
    if not sizes and rows % ranks:
        raise InvalidArgumentError(f"all_to_all: {ranks} ranks do not divide {name} dim 0, {rows}")
    if sizes and (len(sizes) != ranks or sum(sizes) != rows):
        raise InvalidArgumentError(
            f"all_to_all: {name} sizes {list(sizes)} are not {rows} rows for {ranks} ranks"
        )
    row = data.numel() // rows * data.element_size() if rows else 0
    return [size * row for size in sizes or [rows // ranks] * ranks]


def _buffer(shards: Sequence[Tensor], data: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return one buffer for all tensors, and its slice for each."""
    counts = [shard.numel() for shard in shards]
    memory = data.new_empty(sum(counts))
    return memory, list(memory.split(counts))


def _byte_counts(shards: Sequence[Tensor]) -> list[int]:
    return [shard.numel() * shard.element_size() for shard in shards]


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _check_count(shards: Sequence[Tensor], size: int, call: str) -> None:
    if len(shards) != size:
        raise InvalidArgumentError(f"{call} needs {size} tensors, one per rank, got {len(shards)}")


def _spread(shards: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    for shard, piece in zip(shards, pieces, strict=True):
        bring_home(shard, piece)


def send(mpi: Any, comm: Any, data: Tensor, dst: int, tag: int) -> Call:
    """Send a tensor to the group's rank `dst`."""
    content = flat(data)
    request = comm.Isend(raw(mpi, content), dest=dst, tag=tag)
    return Call("send", [request], [data], keep=content)


def receive(mpi: Any, comm: Any, data: Tensor, src: int, tag: int) -> Call:
    """Fill a tensor from the group's rank `src`, or from any."""
    content = flat(data)
    request = comm.Irecv(raw(mpi, content), source=src, tag=tag)
    finish = partial(bring_home, data, content)
    size = content.numel() * content.element_size()
    expected = size if size <= MOST else None  # MPI cannot count more bytes
    return Call("recv", [request], [data], finish, content, expected)

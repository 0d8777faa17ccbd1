"""Send byte buffers whose lengths differ from rank to rank and are known on every rank."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..collectives.messages import recv, send
from ..transport.ways import arrived, way_of
from ..wire.backend import bring_home, gather_texts, host_device
from ..wire.work import identity
from ..world.info import group_ranks

Buffer = bytearray | memoryview

PIECE = 1 << 30  # bytes in one message: some backends count in 31 bits
LONGEST_ERROR = 2000  # characters of an error's text that are sent
SMALL = 1 << 16  # bytes up to which padding costs less than one message per rank


def broadcast_bytes(content: Buffer, src: int, members: ProcessGroup) -> None:
    """Fill `content`, equally long on every rank, with that of global rank `src`."""
    data = torch.frombuffer(content, dtype=torch.uint8)
    wire = data.to(host_device(members))
    way = way_of(wire, members)
    for piece in wire.split(PIECE):
        way.broadcast(piece, src, arrived, False)
    bring_home(data, wire)


def all_gather_bytes(content: Buffer, lengths: list[int], members: ProcessGroup) -> list[Buffer]:
    """All-gather the ranks' bytes, which have these lengths, none of them 0."""
    if max(lengths) <= SMALL:
        filled = torch.zeros(max(lengths), dtype=torch.uint8)
        filled[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        wire = filled.to(host_device(members))
        rows = cast(Tensor, way_of(wire, members).all_gather(wire, identity, False))
        return [_read(row, n) for row, n in zip(rows.unbind(), lengths, strict=True)]
    found: list[Buffer] = []
    for rank, length in zip(group_ranks(members), lengths, strict=True):
        found.append(content if rank == c10d.get_rank() else bytearray(length))
        broadcast_bytes(found[-1], rank, members)
    return found


def gather_bytes(
    content: Buffer, lengths: list[int], dst: int, members: ProcessGroup
) -> list[Buffer]:
    """Gather the ranks' bytes on global rank `dst`; return an empty list on other ranks."""
    rank, device = c10d.get_rank(), host_device(members)
    if max(lengths) <= SMALL:
        found = all_gather_bytes(content, lengths, members)
        return found if rank == dst else []
    if rank != dst:
        wire = torch.frombuffer(content, dtype=torch.uint8).to(device)
        for piece in wire.split(PIECE):
            send(piece, dst, members)
        return []
    found = []
    for source, length in zip(group_ranks(members), lengths, strict=True):
        found.append(content if source == rank else bytearray(length))
        if source != rank:
            data = torch.frombuffer(found[-1], dtype=torch.uint8)
            wire = data.to(device)
            for piece in wire.split(PIECE):
                recv(piece, source, members)
            bring_home(data, wire)
    return found


def errors_of_all(error: str | None, members: ProcessGroup) -> list[str]:
    """Gather the errors of all ranks, each named with its rank; every rank must call it."""
    texts = gather_texts((error or "")[:LONGEST_ERROR], members)
    ranks = group_ranks(members)
    return [f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True) if text]


def _read(data: Tensor, length: int) -> bytearray:
    content = bytearray(length)
    torch.frombuffer(content, dtype=torch.uint8).copy_(data[:length])
    return content

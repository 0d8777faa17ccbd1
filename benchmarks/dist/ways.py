"""The calls to compare, each in raw torch.distributed, in ours and in MMEngine's.

Raw torch does the same job in the fastest way; it also allocates what the call returns.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as raw
from torch import Tensor

import scaletorch.dist as ours

from ..harness.turns import Run

Ways = dict[str, Run]

TORCH, OURS, MMENGINE, LOOP = "torch", "ours", "MMEngine", "torch, a loop"
all_gather_single = getattr(raw, "all_gather_single", None) or raw.all_gather_into_tensor


def mmengine() -> Any:
    """Return MMEngine's dist, or None if it cannot be imported."""
    try:
        return importlib.import_module("mmengine.dist")
    except ImportError:
        return None


def _ways(in_torch: Run | None, in_ours: Run, in_theirs: Run | None = None) -> Ways:
    """Return the ways there are; MMEngine's only if it can be imported."""
    found = {TORCH: in_torch, OURS: in_ours, MMENGINE: in_theirs if mmengine() else None}
    return {name: run for name, run in found.items() if run is not None}


def tensors(size: int) -> Iterator[tuple[str, Ways]]:
    """Yield every call of a tensor, by name.

    Args:
        size: Bytes of this rank's tensor; of the full tensor for calls that split it.
    """
    data = torch.zeros(max(2, size // 4)).fill_(0)
    yield from _rooted(data)
    yield from _joining(data)
    yield from _splitting(data)
    yield from _messages(data)


def _rooted(data: Tensor) -> Iterator[tuple[str, Ways]]:
    theirs = mmengine()
    yield (
        "all_reduce",
        _ways(
            lambda: raw.all_reduce(data),
            lambda: ours.all_reduce(data),
            lambda: theirs.all_reduce(data),
        ),
    )
    yield "reduce", _ways(lambda: raw.reduce(data, 0), lambda: ours.reduce(data, 0))
    yield (
        "broadcast",
        _ways(
            lambda: raw.broadcast(data, 0),
            lambda: ours.broadcast(data, 0),
            lambda: theirs.broadcast(data, 0),
        ),
    )


def _joining(data: Tensor) -> Iterator[tuple[str, Ways]]:
    theirs, ranks, first = mmengine(), raw.get_world_size(), raw.get_rank() == 0

    def all_gather() -> list[Tensor]:
        rows = data.new_empty((ranks, *data.shape))
        all_gather_single(rows.view(-1), data)
        return list(rows.unbind(0))

    def gather() -> list[Tensor]:
        rows = list(data.new_empty((ranks, *data.shape)).unbind(0)) if first else None
        raw.gather(data, rows, 0)
        return rows or []

    yield (
        "all_gather",
        _ways(all_gather, lambda: ours.all_gather(data), lambda: theirs.all_gather(data)),
    )
    yield "gather", _ways(gather, lambda: ours.gather(data, 0), lambda: theirs.gather(data, 0))


def _splitting(data: Tensor) -> Iterator[tuple[str, Ways]]:
    parts = list(data.chunk(raw.get_world_size()))
    own, first = parts[0].clone(), raw.get_rank() == 0

    def all_to_all() -> Tensor:
        received = torch.empty_like(data)
        raw.all_to_all_single(received, data)
        return received

    yield (
        "reduce_scatter",
        _ways(lambda: raw.reduce_scatter(own, parts), lambda: ours.reduce_scatter(own, parts)),
    )
    yield (
        "scatter (list checked)",
        _ways(
            lambda: raw.scatter(own, parts if first else None, 0),
            lambda: ours.scatter(own, parts if first else None, 0),
        ),
    )
    yield "all_to_all (sizes checked)", _ways(all_to_all, lambda: ours.all_to_all(data))
    sent, received = parts, [part.clone() for part in parts]
    joined = torch.cat(received)

    def all_to_all_lists() -> None:
        raw.all_to_all_single(joined, torch.cat(sent))
        for target, part in zip(received, joined.chunk(len(received)), strict=True):
            target.copy_(part)

    yield "all_to_all, lists", _ways(all_to_all_lists, lambda: ours.all_to_all(sent, received))


def _messages(data: Tensor) -> Iterator[tuple[str, Ways]]:
    rank, received = raw.get_rank(), data.clone()
    peer = 1 - rank

    def ping_pong(send: Callable[..., Any], recv: Callable[..., Any]) -> None:
        (send if rank == 0 else recv)(data, peer)
        (recv if rank == 0 else send)(data, peer)

    def batch() -> None:
        operations = [raw.P2POp(raw.isend, data, peer), raw.P2POp(raw.irecv, received, peer)]
        for handle in raw.batch_isend_irecv(operations):
            handle.wait()

    yield (
        "send, recv",
        _ways(lambda: ping_pong(raw.send, raw.recv), lambda: ping_pong(ours.send, ours.recv)),
    )
    yield "exchange", _ways(batch, lambda: ours.exchange([(data, peer)], [(received, peer)]))


def barriers() -> Iterator[tuple[str, Ways]]:
    """Yield the calls without data."""
    theirs = mmengine()
    yield "barrier", _ways(raw.barrier, ours.barrier, lambda: theirs.barrier())
    if theirs:
        yield "sync_random_seed", {OURS: ours.sync_random_seed, MMENGINE: theirs.sync_random_seed}


def models() -> Iterator[tuple[str, Ways]]:
    """Yield calls on many parameters and on dicts; torch's way is one flat all-reduce."""
    large = [(4096, 1024)] * 4 + [(1024, 1024)] * 3 + [(1024,)] * 40
    for name, shapes in (
        ("all_reduce_params, 100 of 1000", [(1000,)] * 100),
        ("all_reduce_params, 20 M in 47", large),
    ):
        yield name, _parameters([torch.zeros(shape).fill_(0) for shape in shapes])
    theirs = mmengine()
    losses = {f"loss {i}": torch.zeros(()) for i in range(10)}
    yield (
        "all_reduce_dict, 10 numbers",
        _ways(
            None,
            lambda: ours.all_reduce_dict(losses, "mean"),
            lambda: theirs.all_reduce_dict(losses, "mean"),
        ),
    )


def _parameters(params: list[Tensor]) -> Ways:
    theirs = mmengine()
    flat = torch.cat([param.view(-1) for param in params])

    def loop() -> None:
        for param in params:
            raw.all_reduce(param)

    found = _ways(
        lambda: raw.all_reduce(flat),
        lambda: ours.all_reduce_params(params),
        lambda: theirs.all_reduce_params(params),
    )
    return found | {LOOP: loop}


def objects() -> Iterator[tuple[str, Ways]]:
    """Yield objects of several kinds through all_gather_object, and results."""
    kinds: dict[str, Any] = {
        "a small dict": {"loss": 1.5, "step": 3, "names": ["a", "b"]},
        "100 000 ints": [7 * i for i in range(100_000)],
        "100 000 floats": [i / 7 for i in range(100_000)],
        "20 000 strings": [f"text number {i}" for i in range(20_000)],
        "10 000 records": [{"id": i, "score": i / 7, "label": "x"} for i in range(10_000)],
        "250 kB of mixed lists": _mixed_lists(),
        "1 MiB of bytes": bytes(1 << 20),
        "4 MiB tensor": torch.zeros(1 << 20),
        "1 000 tensors": [torch.tensor(float(i)) for i in range(1000)],
    }
    for name, data in kinds.items():
        yield f"all_gather_object, {name}", _object(data)
    theirs, results = mmengine(), [(i, i / 7) for i in range(5000)]
    yield (
        "collect_results, 10 000 pairs",
        _ways(
            None,
            lambda: ours.collect_results(results, 10_000),
            lambda: theirs.collect_results(results, 10_000, "gpu"),
        ),
    )


def _mixed_lists() -> list[Any]:
    chance = random.Random(0)
    makers: list[Run] = [
        lambda: chance.randrange(10 ** chance.randrange(1, 12)),
        chance.random,
        lambda: chance.choice(("cat", "dog", "mouse")),
        lambda: f"text {chance.random()}",
        lambda: None,
        lambda: [1, 2.5, "a"],
    ]
    return [chance.choice(makers)() for _ in range(19_000)]


def _object(data: Any) -> Ways:
    theirs = mmengine()

    def gathered() -> list[Any]:
        everything = [None] * raw.get_world_size()
        raw.all_gather_object(everything, data)
        return everything

    return _ways(
        gathered, lambda: ours.all_gather_object(data), lambda: theirs.all_gather_object(data)
    )

"""Seeded programs of collectives and messages, the same on all ranks, with faults to put in."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch import guard

DTYPES = ("float32", "float64", "int32", "bfloat16")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce", "barrier")
MESSAGES = ("pair", "ring")

KINDS = (
    "exception", "kill", "stop", "loop", "skip", "swap", "call", "op", "dtype", "shape", "stride",
    "root", "group", "unsent", "crossed", "early", "interrupt", "lock", "regex", "lines", "size",
    "alike",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call of a program: `root` is an index into the group; `sleep` comes before the call."""

    name: str
    group: str = "world"
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    sleep: float = 0.0
    transposed: bool = False


@dataclass(frozen=True)
class Fault:
    """One rank's deviation, at one call of one step."""

    kind: str
    rank: int
    step: int
    place: int
    delay: float = 0.0


@dataclass(frozen=True)
class Program:
    """Steps of calls on `size` ranks."""

    size: int
    steps: tuple[tuple[Call, ...], ...]
    fault: Fault | None = None


def make_program(seed: int, kind: str | None, steps: int = 12) -> Program:
    """Return the program of a seed, with a fault of a kind, or without one."""
    draw = random.Random(f"{seed} {kind}")
    size = draw.choice((2, 2, 3, 4, 4, 5, 6, 8))
    groups = ["world", "ep"] + (["tp", "dp"] if size % 2 == 0 and size > 2 else [])
    calls = [
        tuple(_draw_call(draw, groups, size) for _ in range(draw.randint(2, 6)))
        for _ in range(steps)
    ]
    if kind is None:
        return Program(size, tuple(calls))
    step = draw.randint(1, steps - 3)
    place = draw.randrange(len(calls[step]))
    calls[step] = _make_room(draw, kind, calls[step], place, groups)
    rank = draw.randrange(size - size % 2 if kind in ("unsent", "crossed", "size") else size)
    if kind == "unsent":
        rank -= rank % 2  # the rank that sends first
    delay = draw.choice((0.0, 0.1)) if kind == "interrupt" else 0.0
    return Program(size, tuple(calls), Fault(kind, rank, step, place, delay))


def _draw_call(draw: random.Random, groups: list[str], size: int) -> Call:
    name = draw.choice((*COLLECTIVES, *COLLECTIVES, *MESSAGES))
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
    if draw.random() < 0.1:
        shape = (draw.choice((10_000, 200_000)),)
    sleep = draw.choice((0.0, 0.0, 0.0, draw.random() / 100))
    group = "world" if name in MESSAGES else draw.choice(groups)
    op = draw.choice(("sum", "max"))
    return Call(name, group, shape, draw.choice(DTYPES), op, draw.randrange(2), sleep)


def _make_room(
    draw: random.Random, kind: str, calls: tuple[Call, ...], place: int, groups: list[str]
) -> tuple[Call, ...]:
    """Return the calls, adapted so that the fault at `place` changes something."""
    call = calls[place]
    if kind in ("op", "dtype", "shape", "group", "call", "skip", "interrupt"):
        call = replace(call, name=draw.choice(("all_reduce", "broadcast")))
        call = replace(call, name="all_reduce") if kind in ("op", "call", "interrupt") else call
    if kind == "interrupt" and draw.random() < 0.3:
        call = replace(call, name="ring", group="world")
    if kind == "root":
        call = replace(call, name=draw.choice(("broadcast", "reduce")))
    if kind == "stride":
        call = replace(call, name="all_reduce", shape=(3, 4))
    if kind == "size":
        call = replace(call, shape=(4,))
    if kind in ("unsent", "crossed", "size"):
        call = replace(call, name="pair", group="world")
    if kind == "group":
        call = replace(call, group="world")
    if kind == "alike":
        call = replace(call, name="all_reduce", group="world")
        calls = (*calls[: place + 1], replace(call, name="again"), *calls[place + 1 :])
    if kind == "swap":
        other = "broadcast" if call.name == "all_reduce" else "all_reduce"
        group = "world" if call.name in MESSAGES else call.group
        calls = (*calls[: place + 1], replace(call, name=other, group=group), *calls[place + 1 :])
    return (*calls[:place], call, *calls[place + 1 :])


def groups_of(size: int) -> dict[str, Any]:
    """Create the groups of a program; every rank calls it."""
    me = dist.get_rank()
    found = {"world": c10d.group.WORLD, "ep": c10d.new_group(group_desc="scaletorch_ep")}
    if size % 2 == 0 and size > 2:
        half = size // 2
        for name, parts in (
            ("tp", [[2 * i, 2 * i + 1] for i in range(half)]),
            ("dp", [list(range(i, size, 2)) for i in range(2)]),
        ):
            for ranks in parts:
                group = c10d.new_group(ranks, group_desc=f"scaletorch_{name}")
                if me in ranks:
                    found[name] = group
    return found


def run_steps(program: Program, groups: dict[str, Any], note: Any) -> list[float]:
    """Run a program on this rank; `note` is called just before the fault."""
    results: list[float] = []
    fault = program.fault
    for step, calls in enumerate(program.steps):
        mine = list(calls)
        here = fault is not None and fault.step == step
        if here and fault is not None and fault.rank == dist.get_rank():
            if fault.kind == "early":
                note()
                return results
            mine = changed(mine, fault, program.size, note)
        elif here and fault is not None and fault.delay:
            place = fault.place
            mine[place] = replace(mine[place], sleep=mine[place].sleep + 3 * fault.delay)
        for call in mine:
            if call.name == "fault":
                _happen(call)
            else:
                results.append(make_call(call, groups))
        guard.step(step)
    return results


def changed(calls: list[Call], fault: Fault, size: int, note: Any) -> list[Call]:
    """Return the faulty rank's calls of the step."""
    place, call = fault.place, calls[fault.place]
    before, after = calls[:place], calls[place + 1 :]
    now = Call("fault", op=fault.kind, sleep=fault.delay, shape=(id(note),))
    _notes[id(note)] = note
    mark = replace(now, op="mark")
    if fault.kind in ("exception", "kill", "stop", "loop", "interrupt", "lock", "regex", "lines"):
        return [*before, now, call, *after]
    if fault.kind == "skip":
        return [*before, mark, *after]
    if fault.kind in ("swap", "alike"):
        return [*before, mark, after[0], call, *after[1:]]
    return [*before, mark, replace(call, **_other(call, fault, size)), *after]


def _other(call: Call, fault: Fault, size: int) -> dict[str, Any]:
    """Return the fields of a call that the faulty rank changes."""
    even = size % 2 == 0 and size > 2
    others: dict[str, dict[str, Any]] = {
        "call": {"name": "broadcast"},
        "op": {"op": "max" if call.op == "sum" else "sum"},
        "dtype": {"dtype": "int32" if call.dtype == "float32" else "float32"},
        "shape": {"shape": (call.shape[0] + fault.rank % 2 + 1, *call.shape[1:])},
        "stride": {"transposed": True},
        "root": {"root": 1 - call.root},
        "group": {"group": "tp" if even and fault.rank % 2 == 0 else "ep"},
        "unsent": {"name": "pair without send"},
        "crossed": {"name": "pair crossed"},
        "size": {"name": "pair with less"},
    }
    return others[fault.kind]


_notes: dict[int, Any] = {}


def make_call(call: Call, groups: dict[str, Any]) -> float:
    """Make a call on this rank; return the sum of its result."""
    if call.sleep:
        time.sleep(call.sleep)
    group = groups[call.group]
    data = torch.ones(call.shape, dtype=getattr(torch, call.dtype))
    data += dist.get_rank(group)
    if call.transposed:
        data = data.t().contiguous().t()
    root = dist.group_ranks(group)[call.root % dist.get_world_size(group)]
    if call.name == "all_reduce":
        dist.all_reduce(data, call.op, group)
    elif call.name == "again":
        dist.all_reduce(data, call.op, group)  # the same call from another line
    elif call.name == "broadcast":
        dist.broadcast(data, root, group)
    elif call.name == "reduce":
        dist.reduce(data, root, call.op, group)
    elif call.name == "all_gather":
        data = torch.stack(dist.all_gather(data, group))
    elif call.name == "barrier":
        dist.barrier(group)
    elif call.name == "ring":
        me, size = dist.get_rank(), dist.get_world_size()
        other = torch.empty_like(data)
        dist.exchange([(data, (me + 1) % size)], [(other, (me - 1) % size)])
        data = other
    else:
        _pair(call.name, data)
    return float(data.double().sum())


def _pair(name: str, data: torch.Tensor) -> None:
    """Send between ranks 2i and 2i + 1, there and back."""
    me = dist.get_rank()
    peer = me ^ 1
    if peer >= dist.get_world_size():
        return
    first = me % 2 == 0
    if name == "pair crossed":
        first = not first
    sent = data.flatten()[1:].clone() if name == "pair with less" else data
    if first:
        if name != "pair without send":
            dist.send(sent, peer)
        dist.recv(data, peer)
    else:
        dist.recv(data, peer)
        dist.send(sent, peer)


def _happen(call: Call) -> None:
    note = _notes[call.shape[0]]
    if call.op == "interrupt" and call.sleep:  # interrupt during the next call

        def later() -> None:
            note()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(call.sleep, later).start()
        return
    note()
    if call.op in ("exception", "lines"):
        more = "\n  + another line\n  - and one more" if call.op == "lines" else ""
        raise ValueError(f"the seeded exception{more}")
    _end(call.op)


def _end(op: str) -> None:
    """Stop this rank from making more calls."""
    if op == "lock":
        ctypes.PyDLL(None).sleep(1000)  # holds the GIL
    if op == "regex":
        re.match("(a+)+$", 64 * "a" + "b")
    if op == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if op == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if op == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    while op == "loop":
        pass

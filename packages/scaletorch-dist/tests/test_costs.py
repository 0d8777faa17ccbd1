"""What calls send, counted by the kernel, is what docs/communication.md says."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import socket
import stat
import struct
import sys
import time
from pathlib import Path

import pytest
import torch

import scaletorch.dist as dist
from scaletorch.dist.bench import CASES
from scaletorch.dist.building import all_to_all_flat
from scaletorch.dist.testing import run_ranks

GUIDE = Path(__file__).parents[3] / "docs" / "communication.md"
ELEMENTS = 3 * 2**17  # which all sizes of groups here divide
P = 4 * ELEMENTS  # bytes of a whole tensor
ACKED = 120  # offset in the kernel's tcp_info of what the other side has acknowledged
HIERARCHICAL = ("all_reduce", "all_gather", "reduce_scatter")
BEYOND = 0.02  # of the bytes: heads of gloo's messages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts by Linux's tcp_info")


def connections():
    """Yield this process's TCP connections: own port, the other's, bytes it has acknowledged."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and one.family != socket.AF_UNIX:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    acknowledged = struct.unpack_from("Q", info, ACKED)[0]
                    yield one.getsockname()[1], one.getpeername()[1], acknowledged


def sent(rank_of):
    """Return the bytes that this process has sent to each rank so far."""
    time.sleep(0.05)  # for acknowledgements
    total = collections.Counter()
    for _, port, acknowledged in connections():
        total[rank_of.get(port)] += acknowledged
    return total


def uneven(size):
    """Return elements for each rank, the fewest for the first."""
    least = ELEMENTS // (size * (size + 1) // 2)
    lengths = [least * (1 + rank) for rank in range(size - 1)]
    return [*lengths, ELEMENTS - sum(lengths)]


def calls(size):
    """Return calls on `P` bytes by the names that the guide uses."""
    rank = dist.get_rank()
    whole = torch.ones(ELEMENTS)
    part = torch.ones(ELEMENTS // size)
    parts = list(whole.clone().split(ELEMENTS // size))
    lengths = uneven(size)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "all_to_all": lambda: dist.all_to_all(whole),
        "all_to_all_flat": lambda: all_to_all_flat(whole, lengths, [lengths[rank]] * size).wait(),
        "broadcast": lambda: dist.broadcast(whole),
        "gather": lambda: dist.gather(part),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None),
    }


def count(nodes, flat=True):
    """Count what this rank sends to every other in each call."""
    if not flat:
        os.environ["GROUP_RANK"] = str(nodes[dist.get_rank()])
        assert dist.use_hierarchy()
    counted = {}
    for name, call in calls(dist.get_world_size()).items():
        call()  # which connects whatever is to be connected
        ports = dist.all_gather_object([port for port, _, _ in connections()])
        rank_of = {port: rank for rank, each in enumerate(ports) for port in each}
        dist.barrier()
        before = sent(rank_of)
        dist.barrier()
        call()
        dist.barrier()
        counted[name] = sent(rank_of) - before
    return counted


def formulas():
    """Return the guide's formulas by the names of the calls, a list for each."""
    if not GUIDE.exists():
        pytest.skip("the guide is in the repository alone")
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    rows = [re.findall("`([^`]+)`", line) for line in lines]
    known = {}
    for name, *found in (row for row in rows if len(row) in (3, 4)):
        known.setdefault(name, []).append(found)
    return known


def value(formula, **sizes):
    allowed = {"P": P, "ceil_log2": lambda n: (n - 1).bit_length(), **sizes}
    return eval(formula, {"__builtins__": {}}, allowed)  # our own guide


def check(call, counted, formula, **sizes):
    """Compare bytes with a formula; gloo's heads and our own barriers are a little more."""
    assert counted == pytest.approx(value(formula, **sizes), rel=BEYOND, abs=2000), call


@pytest.mark.parametrize("size", [3, 4])
def test_calls_send_what_the_guide_says(size):
    rows = run_ranks(count, size, None)
    known = formulas()
    for call in rows[0]:
        most, total = known[call][0]
        by_rank = [sum(row[call].values()) for row in rows]
        check(call, max(by_rank), most, N=size, S=4 * uneven(size)[0])
        check(call, sum(by_rank), total, N=size)


@pytest.mark.parametrize("size", [2, 3])
def test_the_bench_counts_the_bytes_of_the_guide(size):
    known = formulas()
    for call in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert CASES[call].factor(size) * P == pytest.approx(value(known[call][0][0], N=size))
    for call in ("gather", "scatter"):
        assert CASES[call].factor(size) * P == pytest.approx(value(known[call][0][1], N=size))


def test_bytes_between_nodes_are_what_the_guide_says():
    nodes = [0, 0, 1, 1, 2, 2]
    size, count_of_nodes = len(nodes), len(set(nodes))
    sizes = {"N": size, "M": count_of_nodes, "L": size // count_of_nodes}
    known = formulas()
    for place, flat in enumerate((True, False)):
        rows = run_ranks(count, size, nodes, flat)
        for call in HIERARCHICAL:
            across = sum(
                row[call][other]
                for rank, row in enumerate(rows)
                for other in row[call]
                if other is not None and nodes[rank] == 0 and nodes[other] != 0
            )
            check(call, across, known[call][1][place], **sizes)

"""Four stages with a tied head, one setting changed in each group, to find why they hang."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as c10d

from scaletorch.dist.testing import relative_error

from .checks import Checks, Found
from .ranks import on_ranks
from .training import SMALL, Problem, compare, losses_on_grid

SECONDS = 20.0  # after which ranks count as hung; other settings took 3 to 6 with their start
STAGES = 4
TIED = {**SMALL, "num_layers": STAGES, "tie_embeddings": True}


def cell(checks: Checks, name: str, env: Mapping[str, str]) -> None:
    """Run one setting of the matrix with both schedules, or only the messages."""
    if name == "torch alone":
        checks.run(name, _alone, checks)
        return
    for schedule in ("zb_h1", "1f1b"):
        problem = Problem(
            {"pp_size": STAGES}, TIED, {"schedule": schedule}, rows=1, micro_batches=1
        )
        checks.run(schedule, _once, checks, name, problem, env)


def _once(checks: Checks, name: str, problem: Problem, env: Mapping[str, str]) -> Found:
    body = _pairs_first if name == "all pairs first" else losses_on_grid
    return compare(checks, problem, body, timeout=SECONDS, env=env)


def _pairs_first(device: str, problem: Problem) -> list[float]:
    """Train after every pair of ranks has exchanged a number in both directions."""
    rank, one = c10d.get_rank(), torch.ones(1, device=device)
    peers = [peer for peer in range(STAGES) if peer != rank]
    calls = [c10d.P2POp(c10d.isend, one, peer) for peer in peers]
    calls += [c10d.P2POp(c10d.irecv, torch.empty_like(one), peer) for peer in peers]
    for work in c10d.batch_isend_irecv(calls):
        work.wait()
    return losses_on_grid(device, problem)


def _alone(checks: Checks) -> Found:
    """Send a pipeline's messages in its order, without this library."""
    every = on_ranks(checks, _messages, STAGES, timeout=SECONDS)
    exact = torch.full((2, 2), 3.0)  # the values at both ends, and the owners' sum
    return Found(relative_error(torch.tensor([every[0], every[-1]]), exact), 0.0)


def _messages(device: str) -> tuple[float, float]:
    """Run one micro-batch: activations down, gradients up, and the tied weight's two owners.

    Each stage adds 1 to the value that it passes on; the owners sum 1 and 2.
    """
    rank, last = c10d.get_rank(), STAGES - 1
    c10d.all_reduce(torch.ones(1, device=device))  # like the agreement of ranks before a step
    if rank in (0, last):  # the tied weight's value
        _exchange(device, {last: 0.0} if rank == 0 else {}, [0] if rank else [])
    result = owned = 0.0
    for first, end, towards in ((0, last, 1), (last, 0, -1)):
        value = 0.0 if rank == first else _exchange(device, {}, [rank - towards])[0]
        if rank == end:
            result = value
        else:
            _exchange(device, {rank + towards: value + 1}, [])
    if rank in (0, last):
        own = 1.0 if rank == 0 else 2.0
        owned = own + _exchange(device, {last - rank: own}, [last - rank])[0]
    return result, owned


def _exchange(device: str, sends: Mapping[int, float], receives: list[int]) -> list[float]:
    into = [torch.empty(1, device=device) for _ in receives]
    calls = [c10d.P2POp(c10d.isend, torch.tensor([x], device=device), p) for p, x in sends.items()]
    calls += [c10d.P2POp(c10d.irecv, x, p) for x, p in zip(into, receives, strict=True)]
    for work in c10d.batch_isend_irecv(calls):
        work.wait()
    return [float(x) for x in into]

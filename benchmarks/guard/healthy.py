"""Healthy jobs under the guard, as demanding as possible: it must report nothing.

    python -m benchmarks.guard.healthy --count 100 --load 4 --seed 0

Each run draws 2 to 4 ranks that create many groups, pause for long, on one rank or on all, hold
the GIL, stop for a moment, fork, send messages, keep calls from other lines and threads in flight,
and end at different times, while other processes keep the cores busy. A report is an error, a
warning, or a rank that waits in the end for one that has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch import guard

from ..harness.tables import parser
from .faults import process_state

STEPS = 25


class _Heard(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def job(seed: int) -> tuple[list[str], float]:
    """Run one job on this rank; return the guard's messages, and the seconds to leave it."""
    heard = _Heard()
    log = logging.getLogger("scaletorch.guard")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    draw, own = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    busy = threading.Event()
    spinner = threading.Thread(target=_spin, args=(busy,), daemon=True)
    if draw.random() < 0.3:
        spinner.start()
    try:
        with guard.watch():
            for step in range(STEPS):
                _step(draw, own)
                guard.step(step)
            time.sleep(own.random())
            ended = time.monotonic()
    finally:
        busy.set()
    return heard.said, time.monotonic() - ended


def _step(draw: random.Random, own: random.Random) -> None:
    """Run a step's calls, the same on all ranks, and a trial on some ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = c10d.new_group() if draw.random() < 0.5 else None
    trial, victim, everybody = draw.choice(TRIALS), draw.randrange(size), draw.random() < 0.1
    works = [dist.all_reduce(torch.ones(3), "sum", group, async_op=True)]
    if me == victim or everybody:
        trial(own)
    if draw.random() < 0.5:
        sent, got = torch.ones(own.choice((2, 2))), torch.empty(2)
        dist.exchange([(sent, (me + 1) % size)], [(got, (me - 1) % size)], group)
    if me == victim:
        works.append(dist.broadcast(torch.ones(2), victim, group, async_op=True))
    else:  # the same call from another line
        works.append(dist.broadcast(torch.ones(2), victim, group, async_op=True))
    if group is not None and draw.random() < 0.3:
        dist.all_gather_object({"from": me}, group)
    for work in works:
        work.wait()


def _pause(own: random.Random) -> None:
    time.sleep(own.choice((0.0, 0.01, 0.3, 1.5)))


def _long_pause(own: random.Random) -> None:
    time.sleep(own.choice((0.1, 3.0)))


def _hold(own: random.Random) -> None:
    """Hold the GIL in a sleep."""
    ctypes.PyDLL(None).usleep(int(own.choice((0.01, 1.0, 3.5)) * 1e6))


def _dump(own: random.Random) -> None:
    """Hold the GIL in computation."""
    pickle.loads(pickle.dumps([{"row": row} for row in range(own.choice((10, 200_000)))]))


def _be_stopped(own: random.Random) -> None:
    """Stop this process for a moment."""
    rank = os.getpid()
    child = os.fork()
    if child == 0:
        while process_state(rank) != "T":
            time.sleep(0.01)
        time.sleep(own.choice((0.1, 0.3)))
        os.kill(rank, signal.SIGCONT)
        os._exit(0)
    os.kill(rank, signal.SIGSTOP)
    os.waitpid(child, 0)


def _fork(own: random.Random) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(0.05)
        os._exit(0)
    os.waitpid(child, 0)


def _nothing(own: random.Random) -> None:
    pass


TRIALS: tuple[Callable[[random.Random], None], ...] = (
    _pause, _long_pause, _hold, _dump, _be_stopped, _fork, *[_nothing] * 12,
)  # fmt: skip


def _spin(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(1000))


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Keep the cores busy with `count` processes."""
    command = [sys.executable, "-S", "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Parse the command line and run it."""
    command = parser(__doc__)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--count", type=int, default=100)
    command.add_argument("--load", type=int, default=4)
    options = command.parse_args()
    bad, latest = 0, 0.0
    with load(options.load):
        for number in range(options.count):
            seed = options.seed * 1_000_003 + number
            try:
                ends = dist.launch(job, random.Random(seed).choice((2, 3, 4)), seed, timeout=300)
            except dist.RankFailedError as error:
                bad += 1
                print(number, "failed:", error, flush=True)
                continue
            said = [text for own, _ in ends for text in own]
            latest = max(latest, *(seconds for _, seconds in ends))
            bad += bool(said)
            print(number, f"{len(ends)} ranks", *said, flush=True)
    print(f"the guard spoke in {bad} of {options.count} healthy jobs; to leave it took ranks "
          f"{latest:.1f} s at most")  # fmt: skip


if __name__ == "__main__":
    main()

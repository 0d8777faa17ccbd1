"""Kinds of faults in training programs, as data: one rank's act, its moment, and who reports it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as c10d

from .programs import Call

Batch = dict[str, torch.Tensor]

OWN = (  # the program's own calls in each step, such as those of metrics
    Call("all_reduce"),
    Call("broadcast", shape=(4,)),
    Call("all_reduce", shape=(2, 3)),
    Call("again", shape=(2, 3)),
    Call("all_reduce", group="dp"),
    Call("ring", shape=(5,)),
)
BIG = 600_000  # elements of a tensor that takes another transport


class Leaves(Exception):
    """Ends a program early, like a return."""


@dataclass
class Scene:
    """Everything that a fault may touch.

    Attributes:
        calls: The program's own calls in this step.
        count: Number of micro-batches.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    manager: Any
    folder: str
    calls: list[Call]
    count: int = 2


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        act: Act of the faulty rank.
        moment: `step` (before it), `gradients` (after backward), `weights` (after the optimizer
            step), `seed` or `model` (before it is parallelized).
        told: `named`: survivors raise `RankFaultError` with the rank in its first line; `two`: the
            rank is among those of the error; `all`: all ranks raise and name the rank; `alike`: all
            ranks raise `CheckpointError`.
        cause: Further text that the first line must have.
        endless: Whether the rank never reports.
        needs: Axes, one of which must be larger than 1.
        rank: 0, -1, or None for any.
        saves: `at once` or `beside` if the program writes checkpoints.
    """

    act: Callable[[Scene], None]
    moment: str = "step"
    told: str = "named"
    cause: str = ""
    endless: bool = False
    needs: tuple[str, ...] = ()
    rank: int | None = None
    saves: str = ""


CAUSE = "ValueError: the seeded exception"


def _raising(where: str, more: str = "") -> Callable[[Scene], None]:
    """Return an act that makes the model or the optimizer raise."""

    def fail(*_: Any) -> None:
        raise ValueError(f"the seeded exception{more}")

    def act(scene: Scene) -> None:
        modules = list(scene.model.modules())
        leaves = [m for m in modules if not list(m.children()) and list(m.parameters(False))]
        if where == "backward":
            next(iter(leaves[-1].parameters())).register_hook(fail)
        elif where == "optimizer":
            scene.optimizer.register_step_pre_hook(fail)
        else:
            leaves[-1 if where == "loss" else 0].register_forward_pre_hook(fail)

    return act


def _raise(error: BaseException) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        raise error

    return act


def _signals(number: int) -> Callable[[Scene], None]:
    return lambda scene: os.kill(os.getpid(), number)


def _calls(**places: Any) -> Callable[[Scene], None]:
    """Return an act that changes calls: `at3={...}` changes the call at index 3."""

    def act(scene: Scene) -> None:
        for place, changes in places.items():
            number = int(place.removeprefix("at"))
            scene.calls[number] = replace(scene.calls[number], **changes)

    return act


def _order(*places: int) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.calls[:] = [scene.calls[place] for place in places]

    return act


def _clean_up(scene: Scene) -> None:
    c10d.destroy_process_group()
    raise Leaves


def _is_continued(scene: Scene) -> None:
    if os.fork() == 0:
        time.sleep(3)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _lacks_memory(scene: Scene) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), size + (64 << 20)))
    torch.ones(1 << 28)


def _opens_a_pipe(scene: Scene) -> None:
    path = os.path.join(scene.folder, "pipe")
    os.mkfifo(path)
    with open(path):
        pass


def _makes_a_group(scene: Scene) -> None:
    """Wait for the next rank; ranks outside a group do not wait for it."""
    me, size = c10d.get_rank(), c10d.get_world_size()
    print(c10d.new_group([me, (me + 1) % size]))


def _loops(scene: Scene) -> None:
    while True:
        pass


def _waits_for_itself(scene: Scene) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _fills_the_disk(scene: Scene) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def _puts_a_file_there(scene: Scene) -> None:
    os.rename(os.path.join(scene.folder, "checkpoint"), os.path.join(scene.folder, "before"))
    with open(os.path.join(scene.folder, "checkpoint"), "w"):
        pass


def _evaluates(scene: Scene) -> None:
    with torch.no_grad():
        scene.model(scene.batch["input_ids"][:, :4])


def _swallows(scene: Scene) -> None:
    _raising("forward")(scene)
    scene.folder = ""  # makes `swallowed` catch the error


def _rows(scene: Scene) -> None:
    scene.batch = {name: data[:4] for name, data in scene.batch.items()}


def _columns(scene: Scene) -> None:
    scene.batch = {name: data[:, :16].contiguous() for name, data in scene.batch.items()}


def _other_data(scene: Scene) -> None:
    scene.batch = {name: (data + 1) % 64 for name, data in scene.batch.items()}


def _micro_batches(scene: Scene) -> None:
    scene.count = 4


def _rate(scene: Scene) -> None:
    scene.optimizer.param_groups[0]["lr"] *= 2


def _gradient(value: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        for parameter in scene.model.parameters():
            if parameter.grad is not None:
                parameter.grad.view(-1)[0] = value
                return

    return act


@torch.no_grad()
def _bit(scene: Scene) -> None:
    data = next(iter(scene.model.parameters())).view(-1)[:1]
    data.view(torch.int32).bitwise_xor_(1 << 12)


@torch.no_grad()
def _weight(scene: Scene) -> None:
    next(iter(scene.model.parameters())).view(-1)[0] = 0.5


@torch.no_grad()
def _no_number(scene: Scene) -> None:
    next(iter(scene.model.parameters())).view(-1)[0] = float("nan")


def _seed(scene: Scene) -> None:
    torch.manual_seed(1)


def _interrupts(scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)


SPLIT = ("dp_size", "cp_size")

KINDS = {
    "forward": Kind(_raising("forward"), cause=CAUSE),
    "backward": Kind(_raising("backward"), cause=CAUSE),
    "loss": Kind(_raising("loss"), cause=CAUSE, rank=-1),
    "lines": Kind(_raising("forward", "\n  + another line\n  - and one more"), cause=CAUSE),
    "optimizer": Kind(_raising("optimizer"), cause=CAUSE),
    "data": Kind(_raise(ValueError("the seeded exception")), cause=CAUSE),
    "no more data": Kind(_raise(StopIteration()), cause="StopIteration"),
    "memory": Kind(_lacks_memory, cause="can't allocate memory"),
    "leave 1": Kind(_raise(SystemExit(1)), cause="SystemExit"),
    "leave 0": Kind(_raise(SystemExit(0))),
    "return": Kind(_raise(Leaves())),
    "clean up": Kind(_clean_up),
    "interrupt": Kind(_interrupts, cause="KeyboardInterrupt"),
    "exit": Kind(lambda scene: os._exit(3), endless=True),
    "kill": Kind(_signals(signal.SIGKILL), endless=True),
    "terminate": Kind(_signals(signal.SIGTERM), endless=True),
    "abort": Kind(lambda scene: os.abort(), endless=True),
    "segfault": Kind(lambda scene: print(ctypes.string_at(0)), endless=True),
    "stop": Kind(_signals(signal.SIGSTOP), endless=True),
    "stop first": Kind(_signals(signal.SIGSTOP), endless=True, rank=0),
    "continue": Kind(_is_continued),
    "lock": Kind(lambda scene: ctypes.PyDLL(None).sleep(1000), endless=True),
    "regex": Kind(lambda scene: print(re.match("(a+)+$", 64 * "a" + "b")), endless=True),
    "loop": Kind(_loops, endless=True),
    "own lock": Kind(_waits_for_itself, endless=True),
    "queue": Kind(lambda scene: queue.Queue[None]().get(), endless=True),
    "pipe": Kind(_opens_a_pipe, endless=True),
    "new group": Kind(_makes_a_group, told="two", endless=True),
    "shape": Kind(_calls(at0={"shape": (5,)}), told="two"),
    "big shape": Kind(_calls(at0={"shape": (BIG + 1,)}), told="two"),
    "transposed": Kind(_calls(at2={"shape": (3, 2)}), told="two"),
    "dtype": Kind(_calls(at0={"dtype": "int32"}), told="two"),
    "op": Kind(_calls(at0={"op": "max"}), told="two"),
    "root": Kind(_calls(at1={"root": 1}), told="two"),
    "call": Kind(_calls(at0={"name": "broadcast"}), told="two"),
    "barrier": Kind(_calls(at0={"name": "barrier"}), told="two"),
    "group": Kind(_calls(at0={"group": "dp"}), told="two", needs=("dp_size",)),
    "swapped groups": Kind(_order(4, 1, 2, 3, 0, 5), told="two", needs=("dp_size",)),
    "order": Kind(_order(1, 0, 2, 3, 4, 5), told="two"),
    "alike": Kind(_order(0, 1, 3, 2, 4, 5), told="two"),
    "skip": Kind(_order(1, 2, 3, 4, 5), told="two"),
    "extra": Kind(_order(0, 0, 1, 2, 3, 4, 5), told="two"),
    "message": Kind(_order(0, 1, 2, 3, 4), told="two"),
    "size": Kind(_calls(at5={"shape": (4,)}), told="two"),
    "evaluates": Kind(_evaluates, told="two", needs=("tp_size",)),
    "swallows": Kind(_swallows, told="two"),
    "batches": Kind(_micro_batches, told="all", needs=("dp_size", "pp_size", "cp_size")),
    "rows": Kind(_rows, told="all", needs=("dp_size", "pp_size", "cp_size")),
    "columns": Kind(_columns, told="all", needs=("dp_size", "pp_size", "cp_size")),
    "other data": Kind(_other_data, told="all"),
    "disk": Kind(_fills_the_disk, told="all", saves="at once"),
    "disk later": Kind(_fills_the_disk, told="all", saves="beside"),
    "file in the way": Kind(_puts_a_file_there, told="alike", saves="at once"),
    "seed": Kind(_seed, "seed", told="all"),
    "weight": Kind(_weight, "model", told="all"),
    "rate": Kind(_rate, "weights", told="all", needs=(*SPLIT, "tp_size")),
    "NaN gradient": Kind(_gradient(float("nan")), "gradients", told="all"),
    "infinite gradient": Kind(_gradient(float("inf")), "gradients", told="all"),
    "NaN weight": Kind(_no_number, "weights", told="all"),
    "bit": Kind(_bit, "weights", told="all", needs=SPLIT),
}


@contextlib.contextmanager
def swallowed(scene: Scene) -> Iterator[None]:
    """Catch the exception if the fault is that the program swallows it."""
    try:
        yield
    except ValueError:
        if scene.folder:
            raise
        sys.stdout.flush()

"""torch.distributed's raw collectives, a tensor's route on a group, and the handle of a call.

A hook reports every call and wait to a guard, if one is installed.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import comm_entry, entry_of_backend, get_comm_device
from ..devices.table import REDUCED
from ..members import require_member
from ..world.info import get_world_size, info_of, infos

T = TypeVar("T")
Group = ProcessGroup | None

# Types of `async_op` in overloads: a call returns its result (Sync) or a Work (Async).
Sync = Literal[False]
Async = Literal[True]


class Guard(Protocol):
    """The interface of the guard that `scaletorch.guard` installs while it is on."""

    def record(self, group: ProcessGroup, call: str, facts: Sequence[Any]) -> object:
        """Record a collective that this thread is about to start; return its note."""

    def record_message(
        self, group: ProcessGroup, data: Tensor, peer: int, tag: int, sends: bool
    ) -> object:
        """Record a send or receive of this rank; return its note."""

    def run(
        self, notes: Sequence[object], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for the recorded notes, and wrap the handles it returns."""

    def tell(self, error: BaseException) -> bool:
        """Report an exception to all ranks; return whether they will raise a fault."""


guard: Guard | None = None


def install_guard(chosen: Guard | None) -> None:
    """Report every call to `chosen` from now on, or to no guard if it is None."""
    global guard, _notes
    guard, _notes = chosen, _Notes()


def tell_guard(error: BaseException) -> bool:
    """Report an exception that ends this rank's work to all ranks, before re-raising it.

    Returns:
        Whether the guard reports a fault to all ranks; if not, the caller must report it.
    """
    current = guard
    return current is not None and current.tell(error)


class _Notes(threading.local):
    """Per thread, the note of the current collective, which is usually the last one recorded."""

    last: object = None


_notes = _Notes()


def record(group: ProcessGroup, call: str, facts: Sequence[Any]) -> None:
    """Report a collective that this thread is about to start to the guard, if there is one."""
    current = guard
    if current is not None:
        _notes.last = current.record(group, call, facts)


def last_note() -> object:
    """Return the guard's note of this thread's last collective, or None without a guard."""
    return None if guard is None else _notes.last


def as_noted(note: object, stage: Callable[[bool], T]) -> T:
    """Start a later stage of an earlier collective, under that collective's note."""
    before, _notes.last = _notes.last, note
    try:
        return stage(True)
    finally:
        _notes.last = before


def note(data: Tensor, peer: int, members: ProcessGroup, tag: int, sends: bool) -> object:
    """Report a send or receive to the guard, if there is one; return the guard's note."""
    current = guard
    return None if current is None else current.record_message(members, data, peer, tag, sends)


def post(call: Callable[..., Any], args: tuple[Any, ...], *notes: object) -> Any:
    """Make the backend's call for messages, through the guard that noted them if there is one."""
    current = guard
    return call(*args) if current is None else current.run(notes, call, *args)


def _guarded(name: str) -> Callable[..., Any]:
    """Wrap a call of torch.distributed so that a guard can interrupt it if it blocks."""

    @functools.wraps(getattr(c10d, name))
    def run(*args: Any, **options: Any) -> Any:
        call = getattr(c10d, name)  # each time, since vendors' plugins and tests replace it
        current = guard  # another thread may uninstall it meanwhile
        if current is None:
            return call(*args, **options)
        return current.run((_notes.last,), call, *args, **options)

    return run


# torch 2.13 renamed these two; its old names warn.
_NEW = hasattr(c10d, "all_gather_single")
all_gather_single = _guarded("all_gather_single" if _NEW else "all_gather_into_tensor")
reduce_scatter_single = _guarded("reduce_scatter_single" if _NEW else "reduce_scatter_tensor")
all_to_all_single = _guarded("all_to_all_single")
raw_all_reduce = _guarded("all_reduce")
raw_barrier = _guarded("barrier")
raw_broadcast = _guarded("broadcast")
raw_gather = _guarded("gather")
raw_reduce = _guarded("reduce")
raw_scatter = _guarded("scatter")

# Dtypes that every backend can send; other dtypes are sent as bytes.
MOVABLE = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int32", "int64")
)


def process_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group of a call, or None for a process without torch.distributed."""
    if group is None:
        if c10d.is_initialized():
            return c10d.group.WORLD
        get_world_size()  # warns once if a launcher started several processes
        return None
    if not isinstance(group, ProcessGroup):
        require_member(group)
    return group


@dataclass(frozen=True, slots=True)
class Route:
    """The route of tensors of one device type on one group."""

    backend: str
    lacks: frozenset[str]  # collectives and reductions that the backend lacks
    native: bool  # the backend takes tensors of this device; else they are copied to its own
    reduces: frozenset[torch.dtype] = REDUCED  # and complex ones, as pairs of numbers


def route(data: Tensor, group: ProcessGroup) -> Route:
    """Return the route of `data` on `group`."""
    device = "cpu" if data.is_cpu else data.device.type
    try:
        return infos[group].routes[device]  # type: ignore[no-any-return]
    except KeyError:
        found = info_of(group).routes[device] = _find_route(device, group)
        return found


def _find_route(device: str, group: ProcessGroup) -> Route:
    config = c10d.get_backend_config(group)
    backend = dict(pair.split(":", 1) for pair in config.split(",")).get(device)
    # Gloo supports only some collectives on accelerators, so it gets copies on the CPU.
    native = backend is not None and (device == "cpu" or backend != "gloo")
    backend = backend if native and backend else comm_entry(group)[1]
    entry = entry_of_backend(backend)
    lacks, reduces = (frozenset(), REDUCED) if entry is None else (entry.lacks, entry.reduces)
    real = {torch.float32, torch.float64} & reduces
    return Route(backend, lacks, native, reduces | {dtype.to_complex() for dtype in real})


def on_wire(data: Tensor, group: ProcessGroup, *, reduced: bool = False) -> Tensor:
    """Return `data` detached, contiguous and on the group's device; copy only if necessary.

    A CPU tensor that is to be `reduced` stays on the CPU if the group's backend does not reduce its
    dtype: the CPU does, since devices may be less precise (such as Cambricon's in float64).
    """
    if data.requires_grad:
        data = data.detach()
    found = route(data, group)
    if not found.native and not (reduced and data.is_cpu and data.dtype not in found.reduces):
        data = data.to(get_comm_device(group))
    if data.is_conj():
        data = data.resolve_conj()
    if data.is_neg():
        data = data.resolve_neg()
    return data.contiguous()


def bring_home(data: Tensor, wire: Tensor) -> None:
    """Copy `wire`, which `on_wire` made from `data`, back into `data` unless they share memory."""
    if wire.data_ptr() != data.data_ptr():
        data.copy_(wire)


def movable(data: Tensor) -> Tensor:
    """Return a contiguous tensor, viewed as bytes if a backend may not support its dtype."""
    return data if data.dtype in MOVABLE else as_bytes(data)


def as_bytes(data: Tensor) -> Tensor:
    """View a contiguous tensor as flat uint8, which every backend can move."""
    # A tensor of at most one element is contiguous with any stride, but `view(dtype)` wants 1.
    flat = data.view(-1) if data.numel() > 1 else data.as_strided((data.numel(),), (1,))
    return flat.view(torch.uint8)


def as_real(data: Tensor) -> Tensor:
    """View a contiguous complex tensor as pairs of real numbers, which every backend can add."""
    return torch.view_as_real(data) if data.is_complex() else data


def host_device(group: ProcessGroup) -> torch.device:
    """Return the device for small tensors that the host reads: the CPU if the group supports it."""
    cpu = torch.device("cpu")
    return cpu if route(torch.empty(0, device=cpu), group).native else get_comm_device(group)


def gather_ints(values: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """All-gather integers, equally many from each rank, and wait for them on the host."""
    return _gather_rows(torch.tensor(values, dtype=torch.int64, device="cpu"), group)


def _gather_rows(values: Tensor, group: ProcessGroup) -> list[list[int]]:
    own = values.to(host_device(group))
    rows = own.new_empty((group.size(), own.numel()))
    all_gather_single(rows.view(-1), own, group=group)
    result: list[list[int]] = rows.tolist()
    return result


def broadcast_ints(values: Sequence[int], src: int, group: ProcessGroup) -> list[int]:
    """Broadcast integers from global rank `src`; every rank passes equally many."""
    data = torch.tensor(values, dtype=torch.int64, device=host_device(group))
    raw_broadcast(data, src, group)
    result: list[int] = data.tolist()
    return result


def gather_texts(text: str, group: ProcessGroup) -> list[str]:
    """All-gather a text of any length from each rank."""
    data = text.encode(errors="backslashreplace")
    lengths = [length for (length,) in gather_ints((len(data),), group)]
    if not any(lengths):
        return [""] * len(lengths)
    content = bytearray(data.ljust(max(lengths), b"\0"))
    rows = _gather_rows(torch.frombuffer(content, dtype=torch.uint8), group)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def digest_of(text: str) -> int:
    """Return a number of 64 bits that differs for different texts."""
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Work(Generic[T]):
    """Communication in flight; `wait()` completes it and returns what a synchronous call returns.

    It keeps the backend's buffers alive. If it is dropped before `wait()`, a send may be lost.
    """

    __slots__ = ("_finish", "_handles", "_keep", "_result")

    def __init__(self, handles: Iterable[Any], finish: Callable[[], T], keep: Any = None) -> None:
        """Store the backend's handles, the completion to run after them, and buffers to keep."""
        self._handles = [handle for handle in handles if handle is not None]
        self._finish: Callable[[], T] | None = finish
        self._keep = keep
        self._result: T | None = None

    def wait(self) -> T:
        """Wait for the communication and complete it; later calls return the same result.

        On devices with streams the current stream waits, not the host.
        """
        if self._finish is not None:
            for handle in self._handles:
                handle.wait()
            self._result = self._finish()
            self._finish = self._keep = None
            self._handles.clear()
        return self._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once, as far as the backend knows."""
        return all(handle.is_completed() for handle in self._handles)


def settled(
    handles: Iterable[Any], finish: Callable[[], T], async_op: bool, keep: Any = None
) -> T | Work[T]:
    """Return the result of `finish`, or for `async_op` a Work that will return it."""
    return Work(handles, finish, keep) if async_op else finish()


def identity(result: T) -> T:
    """Return the result: a completion with nothing left to do."""
    return result


def nothing(*_: object) -> None:
    """Do nothing: a completion for in-place operations, which returns None."""

"""Record the last calls of this process, and its waits while they last."""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..dist import get_rank
from ..dist.building import describe
from ..dist.devices import comm_entry
from ..dist.errors import RankFaultError
from .calls import Board, call_site, group_label
from .facts import Channel, Entry, Fault

PATIENCE = 3.0  # seconds to wait for the verdict on the cause of a network error

_NETWORK = re.compile(r"gloo|pair closure|connect|timed? ?out|broken pipe|nccl|peer", re.IGNORECASE)


class Verdict:
    """The verdict on the job."""

    def __init__(self) -> None:
        self.over = threading.Event()  # set once the guard has ended, with or without a fault
        self.fault: Fault | None = None

    def conclude(self, fault: Fault | None) -> None:
        """Record that the guard has ended, with or without a fault."""
        self.fault = fault
        self.over.set()

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self.fault is not None:
            raise self.error()

    def error(self) -> RankFaultError:
        """Return the exception for the fault."""
        kind, ranks, text = self.fault or Fault("", (), "")
        return RankFaultError(text, ranks=ranks, kind=kind)

    def explain(self, error: Exception) -> BaseException:
        """Return the fault that caused a network error, or the error itself."""
        if self.fault is None and not _NETWORK.search(str(error)):
            return error
        self.over.wait(PATIENCE)
        return error if self.fault is None else self.error()

    def caused(self, error: BaseException) -> bool:
        """Return whether a known fault caused an error."""
        return isinstance(error, RankFaultError) or (
            isinstance(error, RuntimeError) and self.explain(error) is not error
        )


PENDING = 256  # calls in streams that are tracked; older ones are forgotten


class Streamed(NamedTuple):
    """A call on a device's stream."""

    number: int  # number of the wait for it, see `Wait`
    note: Note
    begun: float
    passed: torch.Event


class Streams:
    """The last calls of this process that its device's streams have not completed.

    NCCL and similar backends enqueue a call on a stream and return. If another rank never makes the
    call, the host blocks later, when it next reads from the device, in a call of torch that is not
    recorded. So an event follows every call, and the watcher looks for the oldest event that its
    stream has not reached.
    """

    def __init__(self) -> None:
        self._calls: deque[Streamed] = deque(maxlen=PENDING)
        self._lock = threading.Lock()

    def add(self, number: int, note: Note, device: str) -> None:
        """Record an event after a call that this thread has just made on the current stream."""
        module = torch.get_device_module(device)
        if getattr(module, "is_current_stream_capturing", bool)():
            return  # an event in a graph that is being captured cannot be queried
        passed = torch.Event(device)
        passed.record()
        with self._lock:
            self._calls.append(Streamed(number, note, time.monotonic(), passed))

    def pending(self) -> Streamed | None:
        """Return the oldest call that its stream has not completed, or None."""
        with self._lock:
            while self._calls:
                if not self._calls[0].passed.query():
                    return self._calls[0]
                self._calls.popleft()
        return None


MARK = 16  # calls of a channel between two marks of its checksum
KEPT = 64  # marks of a channel that are kept until they are sent
TEXT = 140  # characters of a call's text
LAST = 256  # recorded calls that are kept

Path = tuple[int, int, bool]  # of messages: the other rank, their tag, and whether this rank sends

_ident = threading.get_ident
_wall, _clock = time.time, time.monotonic


class Note(NamedTuple):
    """A recorded call: its channel's track, and its number in the channel."""

    track: Track
    seq: int


@dataclass(slots=True, eq=False)
class Track:
    """The progress of this rank in one channel."""

    key: str
    channel: Channel
    device: str  # device type whose streams run the calls; "" for the CPU
    tag: int  # hash of the key, 48 bits
    count: int = 0
    rolling: int = 0  # checksum of the calls
    sites: int = 0  # checksum of the lines that made them
    marks: deque[tuple[str, int, int, int]] = field(  # not sent yet
        default_factory=lambda: deque(maxlen=KEPT)
    )
    owner: int | None = None  # the thread that makes the calls; 0 for several
    sent: int | None = None  # calls that the monitor knows of; None for a new channel

    def mark(self, moment: str) -> None:
        """Keep the checksums of the calls so far, to be compared with other ranks' at `moment`."""
        self.marks.append((moment, self.count, self.rolling, self.sites))


@dataclass(slots=True, eq=False)
class Handle:
    """A wrapper of a backend's handle that records waits and ends them at a fault."""

    handle: Any
    note: Note | None
    recorder: Recorder

    def wait(self) -> None:
        """Wait until the call is done."""
        self.recorder.waiting(self.note, self.handle.wait)

    def is_completed(self) -> bool:
        """Return whether the call is done."""
        done: bool = self.handle.is_completed()
        return done


class Recorder:
    """The guard to which collectives report their calls; see `scaletorch.dist.building.Guard`."""

    def __init__(
        self, board: Board, verdict: Verdict, tell: Callable[[BaseException], bool]
    ) -> None:
        self.verdict, self.tell = verdict, tell
        self.entries: deque[Entry] = deque(maxlen=LAST)
        self.board: Board | None = board
        self._check = verdict.check
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[ProcessGroup, dict[Path | None, Track]]
        self._known = WeakKeyDictionary()
        self._callers: set[int] = set()  # threads that have made calls
        self.tracks: dict[str, Track] = {}
        self.waits: dict[int, tuple[int, Note, float]] = {}  # thread -> its wait
        self.streams = Streams()
        self.step: int | None = None  # the last completed step
        self._waits = itertools.count(1)

    def record(self, group: ProcessGroup, call: str, facts: Sequence[Any]) -> Note:
        """Record a collective that this thread is about to start."""
        self._check()
        track = self.track(group)
        text = describe(call, *facts)
        return self._write(track, f"{text} {len(track.channel.members)}", text)

    def record_message(
        self, group: ProcessGroup, data: Tensor, peer: int, tag: int, sends: bool
    ) -> Note:
        """Record a send or receive that this thread is about to start."""
        self._check()
        track = self.track(group, (peer, tag, sends))
        shape = describe("", data)[1:-1]
        text = f"send({shape}) to rank {peer}" if sends else f"recv({shape}) from rank {peer}"
        # A message must agree in the number of elements, not in the shape.
        return self._write(track, f"{data.dtype} {data.numel()}", text)

    def run(
        self, notes: Sequence[Any], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for the notes, and wrap its handle or handles."""
        handles = self.waiting(notes[0], call, *args, **options)
        if not isinstance(handles, list):
            return None if handles is None else Handle(handles, notes[0], self)
        if len(handles) != len(notes):  # the backend coalesced a batch
            notes = [notes[0]] * len(handles)
        return [Handle(handle, note, self) for handle, note in zip(handles, notes, strict=True)]

    def waiting(
        self, note: Note | None, call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make a call that may block, and record the wait while it does."""
        if note is None:
            return call(*args, **options)
        thread = _ident()
        try:
            self.waits[thread] = (next(self._waits), note, _clock())
            result = call(*args, **options)
        except RuntimeError as error:
            explained = self.verdict.explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self.waits.pop(thread, None)
        if note.track.device:
            self.streams.add(next(self._waits), note, note.track.device)
        return result

    def end_step(self, number: int) -> None:
        """Keep the checksums of this thread's calls at the end of a step."""
        thread, self.step = _ident(), number
        tracks = [track for track in list(self.tracks.values()) if track.owner == thread]
        self.mark(tracks, f"the end of step {number}")

    def mark(self, tracks: Iterable[Track], moment: str) -> None:
        """Keep the checksums of the calls so far, by the moment's name."""
        with self._lock:
            for track in tracks:  # the two ends of a message may be in different steps
                track.mark(f"call {track.count}" if track.channel.message else moment)

    def free_threads(self, waits: Container[int]) -> tuple[int, bool]:
        """Return how many calling threads are not in `waits`, and whether others might call."""
        callers = set(sys._current_frames()) & self._callers
        known = {*self._callers, threading.main_thread().ident}
        foreign = any(not t.daemon and t.ident not in known for t in threading.enumerate())
        return sum(thread not in waits for thread in callers), foreign

    def _write(self, track: Track, same: str, text: str) -> Note:
        """Record a call; `same` is the text that must be equal on every member of its channel."""
        thread = _ident()
        site, line = call_site()
        check = crc32(same.encode(errors="backslashreplace"))
        text = text if len(text) <= TEXT else f"{text[: TEXT - 2]} …"
        # One lock for all, so that checksums, marks and entries cover the same calls.
        with self._lock:
            seq = track.count
            track.count = seq + 1
            track.rolling = (track.rolling * 1000003 ^ check) & 0xFFFFFFFFFFFFF
            track.sites = (track.sites * 1000003 ^ line) & 0xFFFFFFFFFFFFF
            self.entries.append(Entry(seq, check, text, site, _wall(), track.key))
            if not (seq + 1) % MARK:
                track.mark(f"call {seq + 1}")
            if track.owner != thread:
                track.owner = thread if track.owner is None else 0
            board = self.board
            differs = board is not None and board.differs(track.tag, seq, check)
        self._callers.add(thread)
        note = Note(track, seq)
        if differs:  # from the call of another rank of this host: wait for the verdict
            if not self.waiting(note, self.verdict.over.wait, PATIENCE):
                self.board = None  # a hash collision of two channels: the board would only delay
            self._check()
        return note

    def track(self, group: ProcessGroup, path: Path | None = None) -> Track:
        """Return the track of a group's collectives, or of its messages on one path."""
        try:
            return self._known[group][path]
        except KeyError:
            device = comm_entry(group)[0]
        if path is None:
            key: str = group.group_name
            channel = Channel(group_label(group), tuple(c10d.get_process_group_ranks(group)))
        else:
            peer, tag, sends = path
            src, dst = (get_rank(), peer) if sends else (peer, get_rank())
            key = f"{group.group_name}:{src}>{dst}:{tag}"
            label = f"messages from rank {src} to rank {dst} in {group_label(group)}"
            channel = Channel(f"{label} (tag {tag})" if tag else label, (src, dst), True)
        hashed = hashlib.blake2b(key.encode(), digest_size=6).digest()
        new = Track(key, channel, "" if device == "cpu" else device, int.from_bytes(hashed))
        with self._lock:
            track = self.tracks.setdefault(key, new)
        self._known.setdefault(group, {})[path] = track
        return track

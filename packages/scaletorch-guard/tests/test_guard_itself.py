"""The guard among healthy ranks and hostile strangers: its own faults are no rank's."""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

from scaletorch import dist, guard
from scaletorch.dist import RankFailedError, RankFaultError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.guard import control, mismatch
from scaletorch.guard.calls import Board
from scaletorch.guard.diagnosis import diagnose
from scaletorch.guard.facts import Fault, Need
from scaletorch.guard.messages import Answer, Connection, Hello, News, Welcome
from scaletorch.guard.mismatch import find_disagreement
from scaletorch.guard.monitor import Monitor, new_picture, update


class Late(dict):
    """The calls of a rank, read so slowly that it makes more of them meanwhile."""

    def values(self):
        found = list(super().values())
        time.sleep(0.002)
        return found


def in_new_groups():
    with guard.watch():
        if dist.get_rank() == 1:
            recorder = control._session.recorder
            recorder.tracks = Late(recorder.tracks)
        group = None
        for step in range(60):
            group = c10d.new_group() if step % 3 == 0 else group
            if dist.get_rank() == 0:
                time.sleep(0.003)
            dist.all_reduce(torch.ones(4), group=group)
            guard.step()


def test_first_calls_in_new_groups_are_no_fault():
    run_ranks(in_new_groups, 2)


def test_a_wait_in_a_channel_that_was_not_told_counts_for_nothing():
    picture = new_picture(2, warn=30.0, patience=60.0)
    news = News({}, {}, {}, None, [[1, "new", 0, 0.0]], 0, False, [])
    for rank in range(2):
        update(picture, rank, news, 10.0)
    assert diagnose(picture, 11.0) is None


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("scaletorch.guard").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def kill_the_monitor():
    """On rank 0, whose only child it is."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # of a thread that has ended since
            for pid in map(int, path.read_text().split()):
                os.kill(pid, signal.SIGKILL)


def with_a_fault_of_the_guard(how):
    heard = Heard()
    begun = time.monotonic()
    with guard.watch(patience=300.0):
        dist.all_reduce(torch.ones(1))
        session = control._session
        if how == "watcher" and dist.get_rank() == 1:
            session.watcher._news = None
        if how == "word" and dist.get_rank() == 1:
            session.watcher.say(News({}, {}, {"none": []}, None, [], 0, False, []), 5.0)
        if how == "killed" and dist.get_rank() == 0:
            kill_the_monitor()
        assert session.verdict.over.wait(30)
        for _ in range(5):
            dist.all_reduce(torch.ones(1))
            guard.step()
    return heard.texts, time.monotonic() - begun < 60


@pytest.mark.parametrize("how", ["watcher", "word", "killed"])
def test_a_fault_of_the_guard_is_told_as_such_and_stops_no_job(how):
    ((texts, soon), *_) = run_ranks(with_a_fault_of_the_guard, 2, how)
    (text,) = texts
    assert text.startswith("the guard is off: ")
    assert soon  # rank 0 does not wait for its patience


def starts_again():
    guard.start(patience=300.0)
    dist.barrier()
    if dist.get_rank() == 0:
        kill_the_monitor()
    assert control._session.verdict.over.wait(30)
    guard.stop()
    try:
        with guard.watch(patience=30.0):
            for _ in range(100):
                if dist.get_rank() == 1:
                    raise ValueError("after the second start")
                dist.all_reduce(torch.ones(1))
    except (RankFaultError, ValueError) as error:
        return getattr(error, "ranks", None)
    return "went on"


def test_a_guard_whose_monitor_was_killed_can_be_started_again():
    assert dist.launch(starts_again, 3, timeout=200) == [(1,), None, (1,)]


def without_an_interpreter():
    heard = Heard()
    sys.executable = "/nowhere/python"
    with guard.watch():
        dist.all_reduce(torch.ones(1))
        return heard.texts, control._session is None


def test_a_monitor_that_cannot_be_started_turns_the_guard_off_on_every_rank():
    (texts, off), (_, also) = dist.launch(without_an_interpreter, 2, timeout=200)
    (text,) = texts
    assert text.startswith("the guard is off: its monitor did not start: ")
    assert off
    assert also


PAYLOADS = [
    '["Hello","é",0,1,"rank 0"]\n'.encode(),
    b'["Hello","\\ud800",0,1,"rank 0"]\n',  # a surrogate
    b'["Hello",null,0,1,"rank 0"]\n["End"]\n',
    b'{"Hello":0}\n',
    b'["__init__"]\n[["Hello"]]\n',
    b"[" * 200_000 + b"\n",  # deep
    b"[1]\n5\n",
    b"\0" * 1000 + b"\n",
    b'["Hello","x",[1],1,"rank 0"]\n',
    b'["Hello","other",0,1,"rank 0"]\n',  # another token
    b'["Hello","",0,1,"rank 0"]\n',
    b'["Hello",' + b"9" * 4_000 + b"]\n",
    b"x" * 100_000,  # no line
    b"",
]


def test_strangers_cannot_end_the_monitor():
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    address = listener.getsockname()
    monitor = Monitor(listener, "token", 1, warn=9.0, patience=9.0)
    thread = threading.Thread(target=monitor.run)
    thread.start()
    strangers = [socket.create_connection(address) for _ in range(100)]
    for payload in PAYLOADS:
        strangers.append(socket.create_connection(address))
        with contextlib.suppress(ConnectionError):  # refused already
            strangers[-1].sendall(payload)
    rank = Connection(socket.create_connection(address))
    rank.send(Hello("token", 0, 1, "rank 0"))
    assert rank.receive() == [Welcome()]
    with pytest.raises(ConnectionRefusedError):  # all are here: nobody is let in any more
        socket.create_connection(address)
    assert thread.is_alive()
    rank.close()
    thread.join(5)
    for stranger in strangers:
        stranger.close()


def test_strangers_that_take_all_descriptors_give_way():
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    *strangers, sock = [socket.socket() for _ in range(100)]
    monitor = Monitor(listener, "token", 1, warn=9.0, patience=9.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 40, limits[1]))
    try:
        for each in strangers:
            each.connect(listener.getsockname())
        thread = threading.Thread(target=monitor.run)
        thread.start()
        sock.connect(listener.getsockname())
        rank = Connection(sock, patience=20.0)
        rank.send(Hello("token", 0, 1, "rank 0"))
        assert rank.receive() == [Welcome()]
        rank.close()
        thread.join(5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in strangers:
            each.close()


def many_times():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    counts = []
    with contextlib.ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        for _ in range(12):
            with guard.watch():
                dist.all_reduce(torch.ones(3))
            counts.append(len(os.listdir("/proc/self/fd")))
    return counts[2:]


def test_it_starts_beyond_1024_descriptors_and_leaves_none_open():
    for counts in run_ranks(many_times, 2):
        assert max(counts) <= min(counts) + 1, counts


def from_other_lines(orders):
    """Four ranks' reports of 12 calls, of which each rank makes two from the lines that it says."""
    picture = new_picture(len(orders), warn=9.0, patience=99.0)
    for rank, lines in enumerate(orders):
        sites = ["a", "b", "c"] * 2 + list(lines) + ["a", "b", "c"] * 2
        entries = [[n, 7, "all_reduce", site, float(n), "g"] for n, site in enumerate(sites)]
        channels = {"g": ["tp", list(range(len(orders))), False]}
        marks = {"g": [("call 10", len(sites), 1, hash(tuple(sites)))]}
        update(
            picture, rank, News(channels, {"g": len(sites)}, marks, None, [], 1, False, []), 10.0
        )
        update(picture, rank, Answer(5, entries, ""), 10.0)
    return picture


def test_equal_calls_in_another_order_are_told_from_calls_of_other_lines():
    fault = find_disagreement(from_other_lines(["xy", "xy", "yx", "xy"]), 10.0)
    assert fault.ranks == (2,)
    assert "rank 2 makes all_reduce at y, then all_reduce at x" in fault.text
    fault = find_disagreement(from_other_lines(["xy", "yx"]), 10.0)
    assert fault.ranks == (0, 1)
    assert "there is no majority" in fault.text
    for orders in (["xy", "zw"], ["xy", "xy", "xz"], ["xy", "yx", "xy", "yx"]):
        picture = from_other_lines(orders)
        assert find_disagreement(picture, 10.0) is None
        assert not isinstance(diagnose(picture, 10.0), (Fault, Need))


def test_the_lines_of_a_channel_are_compared_once_for_all_its_marks(monkeypatch):
    picture, looks = from_other_lines(["xy", "zw"]), []
    for report in picture.reports.values():
        (mark,) = report.marks["g"].values()
        report.marks["g"] = {f"the end of step {n}": mark for n in range(50)}
    monkeypatch.setattr(mismatch, "_swap", lambda key, picture: looks.append(key))
    assert find_disagreement(picture, 10.0) is None
    assert looks == ["g"]


def test_a_table_of_another_user_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board, precious = Board("x"), tmp_path / "precious"
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(StateError, match="belongs to another user"):
        Board("x")
    monkeypatch.undo()
    board.close()
    precious.write_text("data")
    os.symlink(precious, board._path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="symbolic links"):
        Board("x")
    assert precious.read_text() == "data"


def sends_less_and_goes_on():
    found = False
    with contextlib.suppress(RankFaultError), guard.watch():
        control._session.recorder.board = None  # as between two hosts
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.empty(4), 0)
        guard.step()
        found = control._session.verdict.over.wait(20)  # before anybody waits, or leaves
    return found


def test_a_message_of_another_size_is_found_where_nobody_waits(tmp_path):
    assert dist.launch(sends_less_and_goes_on, 2, env={"TMPDIR": str(tmp_path)}) == [True, True]


def makes_another_call(size, dtype, late):
    """One rank makes a call that gloo aborts others for, as the first or as the last."""
    rank = dist.get_rank()
    with guard.watch(patience=30.0):
        dist.all_reduce(torch.ones(3))
        time.sleep(0.3 if (rank == 1) == late else 0)
        own = (size, dtype) if rank == 1 else (4, torch.float32)
        dist.all_reduce(torch.ones(own[0], dtype=own[1]))
        dist.barrier()


@pytest.mark.parametrize(
    ("size", "dtype", "late"), [(4, torch.float64, True), (500_000, torch.float32, False)]
)
def test_a_call_of_other_bytes_is_not_made_where_a_rank_of_the_host_made_another(size, dtype, late):
    with pytest.raises(RankFailedError) as caught:
        dist.launch(makes_another_call, 3, size, dtype, late, timeout=200)
    assert set(caught.value.exceptions) == {0, 1, 2}  # nobody was aborted
    for error in caught.value.exceptions.values():
        assert isinstance(error, RankFaultError)
        assert (error.kind, error.ranks) == ("mismatch", (1,))


def held_back_in_vain():
    with guard.watch(patience=30.0):
        recorder, store = control._session.recorder, c10d.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:  # another channel's call has the place of this one's
            track = recorder.track(c10d.group.WORLD)
            recorder.board.differs(track.tag, 0, 1)
            store.set("taken", "")
        store.wait(["taken"])  # not by a call of the group: it would take the place itself
        dist.barrier()
        dist.all_reduce(torch.ones(3))
        guard.step()
        return recorder.board is None


def test_who_was_held_back_in_vain_goes_on():
    assert dist.launch(held_back_in_vain, 2, timeout=200) == [True, True]

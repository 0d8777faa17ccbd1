import importlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as c10d

from scaletorch import dist, guard
from scaletorch.dist import RankFailedError, RankFaultError
from scaletorch.dist.building import all_gather_flat, reduce_scatter_flat
from scaletorch.dist.startup.rendezvous import free_port
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.dist.wire import backend


def label():
    rank = c10d.get_rank()
    return f"rank {rank} (dp{rank} tp0)"


def outcome(mistake):
    """Run `mistake(rank)` among guarded steps on every rank; return what each rank raised."""
    return dist.launch(guarded, 3, mistake, timeout=40)


def guarded(mistake):
    rank = dist.get_rank()
    try:
        with guard.watch(label=label, warn=0.3, patience=1.5):
            for number in range(6):
                dist.all_reduce(torch.ones(3))
                if number == 3:
                    mistake(rank)
                guard.step(number)
    except BaseException as error:
        assert backend.guard is None
        kind = getattr(error, "kind", "")
        return type(error).__name__, kind, getattr(error, "ranks", ()), str(error)
    return "", "", (), ""


def raises(rank):
    if rank == 1:
        time.sleep(0.5)  # until the others wait in their next call
        raise ValueError("the loss is NaN\n  + 1 of " + "2" * 400)


def test_an_exception_reaches_every_rank_with_its_text():
    own = outcome(raises)
    assert own[1][:2] == ("ValueError", "")
    for rank in (0, 2):
        name, kind, ranks, text = own[rank]
        assert (name, kind, ranks) == ("RankFaultError", "exception", (1,))
        assert text.startswith("rank 1 (dp1 tp0) raised ValueError: the loss is NaN + 1 of 222")
        assert "Traceback" in text
        assert "all_reduce(float32[3], sum) at tests/test_guard.py" in text
        assert "rank 0 (dp0 tp0) waits" in text


def receives_in_vain(rank):
    if rank == 1:
        dist.recv(torch.empty(2), 2)
    if rank == 0:  # beside the monitor
        raise ValueError("before the message")


def test_a_blocked_message_is_freed_and_the_monitors_own_rank_may_raise():
    raised, *told = [entry[:3] for entry in outcome(receives_in_vain)]
    assert raised == ("ValueError", "", ())
    assert told == [("RankFaultError", "exception", (0,))] * 2


def crosses(rank):
    if rank < 2:
        dist.recv(torch.empty(2), 1 - rank)


def sums_other(rank):
    dist.all_reduce(torch.ones(2), "max" if rank == 2 else "sum")


def flat_calls(rank):
    counts = [2, 2, 3] if rank == 1 else [3, 2, 2]
    reduce_scatter_flat(torch.ones(7), [3, 2, 2]).wait()
    all_gather_flat(torch.ones(7), [3, 2, 2])
    dist.barrier()
    if rank == 1:
        all_gather_flat(torch.ones(7), counts, async_op=True)
    else:
        reduce_scatter_flat(torch.ones(7), counts)


def leaves(rank):
    if rank == 1:
        guard.stop()
        time.sleep(2)


def test_a_rank_that_leaves_is_named_by_those_who_wait():
    own = outcome(leaves)
    assert own[0][1:3] == own[2][1:3] == ("left", (1,))


def sleeps(rank):
    if rank == 1:
        time.sleep(4)


def tells_and_waits(rank):
    if rank == 1:
        told = guard.tell(ValueError("in a stage"))
        dist.all_reduce(torch.ones(2 if told else 3))  # as who ends a step with the others


def sends_less(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    if rank == 1:
        dist.recv(torch.empty(4), 0)


FAULTS = [
    (crosses, "cycle", (0, 1), ["recv(float32[2]) from rank 1"]),
    (sums_other, "mismatch", (2,), ["[2], max) at tests/test_guard.py", "where rank 0 (dp0 tp0)"]),
    (flat_calls, "mismatch", (1,), ["all_gather_flat(float32[7], [2, 2, 3])"]),
    (sleeps, "slow", (1,), ["rank 1 (dp1 tp0) was at:", "time.sleep(4)"]),
    (tells_and_waits, "exception", (1,), ["rank 1 (dp1 tp0) raised ValueError: in a stage\n"]),
    (sends_less, "mismatch", (0, 1), ["send(float32[3]) to rank 1", "there is no majority"]),
]


@pytest.mark.parametrize(
    ("mistake", "kind", "ranks", "words"), FAULTS, ids=[row[0].__name__ for row in FAULTS]
)
def test_a_fault_is_the_same_error_on_every_rank(mistake, kind, ranks, words):
    for name, *found, text in outcome(mistake):
        assert (name, *found) == ("RankFaultError", kind, ranks)
        assert all(each in text for each in words), text


def dies():
    with guard.watch():
        for number in range(20):
            if (dist.get_rank(), number) == (0, 12):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(number + 1))
            time.sleep(0.3 if number == 11 else 0)  # for the last news before the end


def test_the_death_of_the_monitors_host_is_an_event():
    with pytest.raises(RankFailedError) as caught:
        dist.launch(dies, 3, timeout=30)
    assert "SIGKILL" in caught.value.failures[0]
    for other in (1, 2):
        error = caught.value.exceptions[other]
        assert isinstance(error, RankFaultError)
        assert (error.kind, error.ranks) == ("death", (0,))
        assert "its last call was all_reduce(float32[12], sum)" in error.text


def without_fault():
    sent, got = torch.ones(2), torch.empty(2)
    me, size = dist.get_rank(), dist.get_world_size()
    with guard.watch():
        for _ in range(40):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            dist.exchange([(sent, (me + 1) % size)], [(got, (me - 1) % size)])
            work.wait()
            dist.all_gather_object({"me": me})
            guard.step()
    return backend.guard is None


def test_nothing_is_left_where_nothing_happened(tmp_path):
    assert run_ranks(without_fault, 3, env={"TMPDIR": str(tmp_path)}) == [True] * 3
    assert list(tmp_path.iterdir()) == []


@distributed_test(world_size=2)
def test_wrong_use():
    with pytest.raises(dist.InvalidArgumentError, match="positive seconds"):
        guard.start(patience=0)
    with guard.watch():
        with pytest.raises(dist.StateError, match="already"):
            guard.start()
        with pytest.raises(dist.InvalidArgumentError, match="unknown reduce operation"):
            dist.all_reduce(torch.ones(1), "no such")
        child = os.fork()  # is no rank, and its end is no rank's death
        if child == 0:
            os._exit(0 if backend.guard is None else 1)
        assert os.waitpid(child, 0)[1] == 0
    guard.stop()


def test_one_process_is_not_guarded():
    assert guard.tell(ValueError("nobody hears it")) is False
    with guard.watch():
        assert backend.guard is None
        guard.step()


SCRIPT = """
import os, sys
import torch
from scaletorch import dist
from scaletorch import guard

rank = "1" if (child := os.fork()) else "0"  # a fork ends as an interpreter does
os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
os.dup2(os.open("said" + rank, os.O_WRONLY | os.O_CREAT), 2)
dist.init_dist("pytorch", backend="gloo")
guard.start()
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("seen by nobody but Python")
dist.all_reduce(torch.ones(1))
"""


def test_one_line_in_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, **names}, timeout=200
    )
    assert done.returncode == 1
    end = time.monotonic() + 30
    expected = "RankFaultError: rank 1 raised ValueError: seen by nobody but Python"
    while expected not in (tmp_path / "said0").read_text():  # the other rank may end later
        assert time.monotonic() < end
        time.sleep(0.1)


@distributed_test(world_size=4)
def test_a_guard_is_told_of_later_stages():
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    assert dist.use_hierarchy()
    with guard.watch():
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        assert [part.tolist() for part in dist.all_gather(torch.ones(1))] == [[1.0]] * 4
        for work in works:
            work.wait()


def test_it_has_its_former_name_too(monkeypatch):
    assert dist.guard is guard
    monkeypatch.delitem(sys.modules, "scaletorch.dist.guard")
    monkeypatch.setitem(sys.modules, "scaletorch.guard", None)  # where its wheel is not installed
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'scaletorch-dist\[guard\]'"):
        importlib.import_module("scaletorch.dist.guard")

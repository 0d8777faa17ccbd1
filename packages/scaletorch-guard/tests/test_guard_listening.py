"""`guard.listening`: who listens hears what the ledger holds, with the guard and without it."""

import os
import sys

import pytest
import torch
import torch.distributed as c10d

from scaletorch import dist, guard
from scaletorch.dist.testing import distributed_test
from scaletorch.dist.wire import port
from scaletorch.guard.ledger import tails

HERE = "tests/test_guard_listening.py"
ALL = "the default group (ranks 0, 1)"


def make_calls():
    """One call of each kind; return what is heard of them, and the lines that made them."""
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    start = sys._getframe().f_lineno
    dist.all_reduce(torch.ones(4, 3).T, "max")
    work = dist.all_gather(torch.ones(2, dtype=torch.int64), async_op=True)
    dist.broadcast_object_list([me], src=1)
    work.wait()
    if me == 0:
        dist.send(torch.ones(2), peer, tag=3)
    else:
        dist.recv(torch.ones(2), peer, tag=3)
    dist.exchange([(torch.ones(5), peer)], [(torch.ones(5), peer)])
    handles = [dist.isend(torch.ones(1), peer)]
    handles.append(dist.irecv(torch.ones(1), peer))
    for handle in handles:
        handle.wait()
    out, back = f"messages from rank {me} to rank {peer}", f"messages from rank {peer} to rank {me}"
    there = "send(float32[2]) to rank 1" if me == 0 else "recv(float32[2]) from rank 0"
    texts = [
        (f"{ALL}: all_reduce(float32[3, 4], max) strides [1, 3]", 1),
        (f"{ALL}: all_gather(int64[2])", 2),
        (f"{ALL}: broadcast_object_list(src=1)", 3),
        (f"messages from rank 0 to rank 1 in the default group (tag 3): {there}", 6 + 2 * me),
        (f"{out} in the default group: send(float32[5]) to rank {peer}", 9),
        (f"{back} in the default group: recv(float32[5]) from rank {peer}", 9),
        (f"{out} in the default group: send(float32[1]) to rank {peer}", 10),
        (f"{back} in the default group: recv(float32[1]) from rank {peer}", 11),
    ]
    return [f"{text} at {HERE}:{start + line} in make_calls" for text, line in texts]


def in_ledger(recorder):
    """What the ledger has, in order, in the words of `listening`."""
    entries = [e for each in tails(recorder.ledger.tail(99), 99).values() for e in each.values()]
    channels = {key: track.channel for key, track in recorder.tracks.items()}
    found = []
    for entry in sorted(entries, key=lambda entry: entry.time):
        label = channels[entry.channel].label
        where = label if label.startswith("messages") else f"{label} (ranks 0, 1)"
        found.append(f"{where}: {entry.text} at {entry.site}")
    return found


@distributed_test(world_size=2)
def test_who_listens_hears_what_the_ledger_holds():
    heard = []
    with guard.listening(heard.append):
        expected = make_calls()
    assert heard == expected
    make_calls()
    assert heard == expected, "heard after the block"
    assert port.guard is None

    with guard.watch():
        recorder = port.guard
        before = len(in_ledger(recorder))
        make_calls()
        with guard.listening(heard.append):
            make_calls()
        assert port.guard is recorder
        assert in_ledger(recorder)[before:] == heard == expected * 2


@distributed_test(world_size=2)
def test_the_guard_may_start_and_stop_meanwhile():
    heard, inner = [], []
    group = c10d.new_group([0, 1], group_desc="scaletorch_tp")
    data = torch.ones(3)
    with guard.listening(heard.append):
        early = dist.all_reduce(data, group=group, async_op=True)
        guard.start()
        early.wait()
        with guard.listening(inner.append), guard.listening(inner.append):
            late = dist.all_reduce(data, group=group, async_op=True)
            note = port.note(data, 1 - dist.get_rank(), group, 0, True)
        guard.stop()
        late.wait()
        assert note is not None, "the guard has not seen the message"
        calls = [text for text in heard if text.startswith("tp (ranks 0, 1): all_reduce")]
        assert data.tolist() == [4.0] * 3
        assert (len(calls), len(inner)) == (2, 4)
        assert inner[:2] == [calls[1]] * 2
        child = os.fork()
        if child == 0:
            os._exit(0 if port.guard is not None and port.guard._recorder is None else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert port.guard is None
    dist.all_reduce(data, group=group)
    assert len(calls) == 2

    def refuse(text):
        raise LookupError(text)

    with guard.listening(refuse), pytest.raises(LookupError, match=r"all_reduce.float32.1.*, sum"):
        dist.all_reduce(torch.ones(1))
    assert port.guard is None


def test_one_process_makes_no_calls():
    heard = []
    with guard.listening(heard.append):
        dist.all_reduce(torch.ones(2))
    assert heard == []

"""The guard where the host does not wait in a call: on a stand-in whose calls run on a stream."""

import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from scaletorch import dist, guard
from scaletorch.dist import RankFailedError, RankFaultError

DEVICE, BACKEND = "npu", "hccl"

pytestmark = pytest.mark.timeout(500)  # the first test builds the stand-in: a minute, or more


@pytest.fixture(autouse=True)
def deferred(plugins, monkeypatch):
    """Ranks find a device whose calls run on a stream."""
    monkeypatch.syspath_prepend(plugins)
    monkeypatch.setenv("STANDIN_DEFERRED", "1")


def outcome(fault, folder):
    """Run guarded steps with a fault on rank 1; return what each living rank raised."""
    try:
        return dist.launch(guarded, 3, fault, folder, backend=BACKEND, timeout=60)
    except RankFailedError:
        return [said(folder, 0), None, said(folder, 2)]


def said(folder, rank):
    return pickle.loads(Path(folder, f"said-{rank}").read_bytes())


def guarded(fault, folder):
    rank = dist.get_rank()
    heard = "", "", (), ""
    try:
        with guard.watch(warn=0.5, patience=2.0):
            for number in range(6):
                if (rank, number) == (1, 3):
                    fault()
                shared = torch.ones(4, device=DEVICE)
                dist.all_reduce(shared)
                guard.step()
                value = shared[0].item()  # waits for the stream
                assert number >= 3 or value == 3
    except (RankFaultError, ValueError) as error:
        kind, ranks = getattr(error, "kind", ""), getattr(error, "ranks", ())
        heard = type(error).__name__, kind, ranks, str(error)
    Path(folder, f"said-{rank}").write_bytes(pickle.dumps(heard))
    end = time.monotonic() + 15
    while rank == 1 and time.monotonic() < end:  # its end would free the others too
        if all(Path(folder, f"said-{other}").exists() for other in (0, 2)):
            return heard
        time.sleep(0.05)
    assert rank != 1, "the others did not come free"
    return heard


OTHERS_WAIT = 1.0  # seconds in which the other ranks reach their next call, also on a busy machine


def raises():
    time.sleep(OTHERS_WAIT)
    raise ValueError("the loss is NaN")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def is_late():
    time.sleep(6)


def leaves():
    time.sleep(OTHERS_WAIT)
    guard.stop()
    raise ValueError("done")


FAULTS = {"exception": raises, "death": dies, "slow": is_late, "left": leaves}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_frees_those_who_read_the_device(kind, tmp_path):
    heard = outcome(FAULTS[kind], tmp_path)
    for rank in (0, 2):
        name, found, ranks, text = heard[rank]
        assert (name, found, ranks) == ("RankFaultError", kind, (1,))
        if kind == "death":  # gloo may have ended what was in the stream before
            continue
        waits = rf"rank {rank} waits( after step 4)? on its device's stream in all_red"
        assert re.search(waits, text)
        assert "call 4 in the default group" in text
        assert "which rank(s) 1 did not make" in text
        assert kind != "slow" or "time.sleep(6)" in text
    if kind == "exception":
        assert heard[1] == ("ValueError", "", (), "the loss is NaN")

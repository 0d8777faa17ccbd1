"""Starts that go wrong: each rank that came says by name what is the matter, within the timeout."""

import contextlib
import os
import re
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as c10d
from hypothesis import given, settings
from hypothesis import strategies as st

import scaletorch.dist as dist
from scaletorch.dist import StateError
from scaletorch.dist.members import name_ranks
from scaletorch.dist.startup.rollcall import Caller, call_roll
from scaletorch.dist.testing import run_ranks

TIMEOUT = 3  # seconds, of init_dist
LIMIT = 60  # seconds, after which a rank that was not told counts as hanging


def start(changes):
    """Join with some variables changed; what init_dist complained about."""
    mine = changes.get(int(os.environ["RANK"]), {})
    if mine is None:
        return None  # this rank never comes
    os.environ.update(mine)
    try:
        dist.init_dist("pytorch", backend="gloo", timeout=TIMEOUT)
    except StateError as error:
        return str(error)
    return "joined"


def complaints(world_size, changes):
    return run_ranks(start, world_size, changes, init=False, timeout=LIMIT)


def test_missing_ranks_are_named_on_every_rank():
    said = complaints(5, {1: None, 3: None})
    assert said[1] is said[3] is None
    for rank in (0, 2, 4):
        assert "the world of 5 ranks did not fill in time: ranks 1, 3 never came" in said[rank]
        assert f"3 came, from {socket.gethostname()}" in said[rank]


def test_a_missing_rank_0_is_named_on_every_rank():
    said = complaints(3, {0: None})
    for rank in (1, 2):
        assert f"rank {rank} could not reach rank 0 at 127.0.0.1 port" in said[rank]
        assert "Connection refused" in said[rank]


def test_a_rank_0_that_never_comes_to_the_store_of_torchruns_agent_is_named():
    agents = c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    mine = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agents.port)}
    said = complaints(3, {0: None, 1: mine, 2: mine})
    assert all("but rank 0 never came to it" in said[rank] for rank in (1, 2))


def test_a_rank_claimed_twice_is_named_on_every_rank():
    said = complaints(3, {2: {"RANK": "1"}})
    assert len(set(said)) == 1
    assert "two processes claim rank 1: process" in said[0]
    assert said[0].count(f"on host {socket.gethostname()}") == 2


AGREED = {  # what one rank is told otherwise -> what every rank says
    "size of the world": (
        {1: {"WORLD_SIZE": "3"}},
        r"rank 1 \(process \d+ on .*\) expects a world of 3 ranks and rank 0 \(",
    ),
    "job": (
        {0: {"TORCHELASTIC_RUN_ID": "one"}, 1: {"TORCHELASTIC_RUN_ID": "two"}},
        r"belongs to job 'two' and rank 0 \(process .* two programs meet at one port",
    ),
}


@pytest.mark.parametrize("what", AGREED)
def test_what_differs_is_named_on_every_rank(what):
    changes, message = AGREED[what]
    said = complaints(2, changes)
    assert len(set(said)) == 1
    assert re.search(message, said[0])


def test_a_name_that_does_not_resolve_is_shown():
    said = complaints(2, {1: {"MASTER_ADDR": "no-such-host.invalid"}})
    assert "rank 1 never came" in said[0]
    assert "at no-such-host.invalid port" in said[1]
    assert "the name does not resolve" in said[1]


def answer(listener, reply):
    """Take connections as a program that is no store would."""
    with contextlib.ExitStack() as kept, contextlib.suppress(OSError):  # until it is shut down
        while True:
            connection = kept.enter_context(listener.accept()[0])
            if reply:
                with connection, contextlib.suppress(OSError):  # the other may be gone
                    connection.sendall(reply)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"], ids=["mute", "http"])
def test_a_port_that_another_program_has_is_named_on_every_rank(reply):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = threading.Thread(target=answer, args=(listener, reply))
        program.start()
        port = str(listener.getsockname()[1])
        said = complaints(2, {rank: {"MASTER_PORT": port} for rank in range(2)})
        listener.shutdown(socket.SHUT_RDWR)
        program.join()
    assert f"rank 0 cannot listen on 127.0.0.1 port {port}" in said[0]
    assert f"rank 1 could not reach rank 0 at 127.0.0.1 port {port}" in said[1]
    assert "what listens there is not the store of rank 0" in said[1]


def join_late():
    """Rank 1 comes when rank 0 has waited for a while: nothing is wrong with that."""
    if os.environ["RANK"] == "1":
        time.sleep(1)
    dist.init_dist("pytorch", backend="gloo", timeout=20)
    return dist.get_world_size()


def test_a_late_rank_is_waited_for():
    assert run_ranks(join_late, 2, init=False) == [2, 2]


def test_ranks_in_words():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1]) == "ranks 0, 1"
    assert name_ranks([1, 4, 5, 6, 9]) == "ranks 1, 4-6, 9"
    assert name_ranks(list(range(0, 1000, 2))).endswith("36, 38, … (500 in all)")


def one_start(server, world_size, restart):
    """All ranks of a start as threads, each with its own connection; who met whom."""
    results = {}

    def rank_of(rank):
        store = c10d.TCPStore(
            "127.0.0.1", server.port, None, False, timedelta(seconds=20), wait_for_workers=False
        )
        deadline = time.monotonic() + 20
        room = call_roll(store, Caller(rank, world_size, "", "host", 0), deadline, shared=True)
        room.set(f"rank {rank}", str(restart))
        results[rank] = [room.get(f"rank {other}") for other in range(world_size)]

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4))
def test_starts_in_one_store_never_see_one_another(starts):
    server = c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for restart, (world_size, died) in enumerate(starts):
        for _ in range(died):  # killed after they had knocked, in an earlier life
            server.queue_push("knocks", f"nonce {restart} {died}")
        met = one_start(server, world_size, restart)
        assert met == dict.fromkeys(range(world_size), [str(restart).encode()] * world_size)

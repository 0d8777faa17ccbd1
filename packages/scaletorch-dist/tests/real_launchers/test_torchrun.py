"""torchrun on two hosts and on one, its restarts after a rank was killed; and no torchrun."""

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from scaletorch.dist.testing import run_ranks

DEATHS = 1
NEW_NETWORK = 0x40000000  # Linux's CLONE_NEWNET


def agents(launch, hosts, torchrun, program, ranks, restarts=0):
    """One torchrun of some ranks on each host, with a c10d rendezvous on the first."""
    started = []
    address = hosts[0][1]
    for (name, own), is_host in zip(hosts, (1, 0), strict=True):
        command = [
            "ip", "netns", "exec", name, *torchrun, "--nnodes=2", f"--nproc-per-node={ranks}",
        ]  # fmt: skip
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29400"]
        command += [f"--rdzv-conf=is_host={is_host}", f"--local-addr={own}"]
        command += [f"--max-restarts={restarts}", *program]
        started.append(launch.start(command))
    return launch.finish(*started, timeout=200)


@pytest.mark.timeout(300)
def test_every_restart_works_on_two_hosts(launch, two_hosts, torchrun, programs):
    log = launch.folder / "log"
    program = [programs / "lives.py", log, DEATHS]
    done = agents(launch, two_hosts, torchrun, program, ranks=1, restarts=2 * DEATHS)
    assert [status for status, _, _ in done] == [0, 0], done
    assert log.read_text() == "2 of 2\n" * (DEATHS + 1)


@pytest.mark.timeout(300)
def test_a_node_that_dies_with_its_torchrun_comes_back(launch, torchrun, programs, free_port):
    """Its command alone is started again, as `until torchrun …` does; no host name is needed."""
    log = launch.folder / "log"
    command = [*torchrun, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}"]
    command += ["--local-addr=127.0.0.1", "--rdzv-conf=join_timeout=200,is_host="]

    def node(is_host):
        own = [*command[:-1], f"{command[-1]}{is_host}", programs / "comes_back.py", log]
        return launch.start(own, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    first, second = node(1), node(0)
    lives = lives_in(log, 2)
    # Which of the two has group rank 0 is torch's choice.
    parents = {int(pid): parent_of(int(pid)) for _, pid, _ in lives}
    for pid, parent in parents.items():
        if parent == second.pid:
            os.kill(second.pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
    done = launch.finish(first, node(0), second, timeout=200)
    assert [status for status, _, _ in done] == [0, 0, -signal.SIGKILL], done
    assert [life[2] for life in lives_in(log, 4)] == ["2"] * 4


def lives_in(log, count):
    """The lines of a log, when there are so many."""
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.05)
    return [line.split() for line in log.read_text().splitlines()]


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started_by_hand(hosts, program, folder):
    """Be the only rank of a host, with the variables that a user sets, and run a program."""
    rank = int(os.environ["RANK"])
    with open(f"/run/netns/{hosts[rank][0]}") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), NEW_NETWORK) == 0
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        del os.environ[name]
    os.environ |= {"MASTER_ADDR": hosts[0][1], "MASTER_PORT": "29401"}
    sys.argv = [str(program), str(folder)]
    runpy.run_path(str(program), run_name="__main__")


def test_torchruns_variables_without_torchrun(launch, two_hosts, programs):
    run_ranks(started_by_hand, 2, two_hosts, programs / "place.py", launch.folder, init=False)
    # Containers of one machine, which have networks of their own, count as nodes.
    assert launch.places() == [f"({rank}, 2, 0, 1) 2.0 pytorch" for rank in range(2)]

"""init_dist and cleanup_dist on real ranks, under every launcher's variables."""

import importlib
import os
import re
import socket
import sys
import time
import types
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as c10d
import torch.distributed.nn.functional

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, StateError, devices
from scaletorch.dist.launchers import read_placement
from scaletorch.dist.startup import initialize, rollcall
from scaletorch.dist.startup.rendezvous import find_meeting, open_store
from scaletorch.dist.testing import distributed_test, run_ranks

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def rename(names):
    """Turn torchrun's variables into those of another launcher; returns the rank."""
    rank = int(os.environ["RANK"])
    values = [os.environ.pop(name) for name in TORCHRUN]
    os.environ.update({new: value for new, value in zip(names, values, strict=True) if new})
    return rank


def ranks_sum():
    data = torch.ones(1)
    c10d.all_reduce(data)
    return int(data.item())


def look():
    """What everyone should see after a successful init_dist."""
    return (
        dist.infer_launcher(),
        dist.get_dist_info(),
        dist.get_local_rank(),
        dist.get_local_size(),
        dist.get_backend(),
        ranks_sum(),
        tuple(int(os.environ[name]) for name in TORCHRUN),
    )


def expected(world_size, launcher):
    for rank in range(world_size):
        place = rank, world_size, rank, world_size
        yield (launcher, place[:2], *place[2:], "gloo", world_size, place)


def seen_by(launcher):
    dist.init_dist(launcher, backend="gloo")
    seen = look()
    dist.cleanup_dist()
    return seen


def as_mpirun(launcher, names):
    del os.environ["MASTER_ADDR"]
    rename(names)
    seen = seen_by(launcher)
    assert not {"RANK", "MASTER_ADDR"} & {*os.environ}
    return seen


def as_srun(launcher):
    size = os.environ["WORLD_SIZE"]
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    rank = rename(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None))
    os.environ |= {
        "SLURM_JOB_ID": str(os.getpgrp()), "SLURM_STEP_ID": "3", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_STEP_NODELIST": "virtual1",
    }  # fmt: skip
    seen = seen_by(launcher)
    assert os.environ["SLURM_PROCID"] == str(rank)
    return seen


@pytest.mark.parametrize(("world_size", "launcher"), [(1, "pytorch"), (4, None)])
def test_torchruns_variables(world_size, launcher):
    found = run_ranks(seen_by, world_size, launcher, init=False)
    assert found == [*expected(world_size, "pytorch")]


OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@pytest.mark.parametrize(("names", "launcher"), [(OPEN_MPI, "mpi"), (HYDRA, None)])
def test_mpiruns_variables(names, launcher):
    assert run_ranks(as_mpirun, 2, launcher, names, init=False) == [*expected(2, "mpi")]


def test_sruns_variables():
    assert run_ranks(as_srun, 2, None, init=False) == [*expected(2, "slurm")]


@distributed_test(world_size=2, init=False)
def test_local_places_come_from_host_names_where_the_launcher_is_silent():
    del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    dist.init_dist("pytorch", backend="gloo")
    assert (dist.get_local_rank(), dist.get_local_size()) == (dist.get_rank(), 2)


@pytest.mark.parametrize("backend", ["nccl", "hccl", "mpi"])
@distributed_test(world_size=2, init=False)
def test_a_backend_that_is_not_here_falls_back_with_one_warning_of_one_rank(backend):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_dist("pytorch", backend=backend)
    assert len(caught) == (1 if dist.get_rank() == 0 else 0)
    entry = devices.entry_of_backend(backend)
    source = (devices.entry_of_backend(entry.instead) or entry).source
    words = "this machine has no cuda device" if backend == "nccl" else source
    for message in (str(each.message) for each in caught):
        assert f"backend '{backend}'" in message
        assert words in message
        assert message.endswith("Using 'gloo' instead; backend='gloo' asks for it")
    assert dist.get_backend() == "gloo"
    assert ranks_sum() == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "ssh"}, "unknown launcher 'ssh': the valid ones are 'pytorch', 'slurm'"),
        ({"init_backend": "jax"}, "unknown init_backend 'jax': the valid ones are 'torch'"),
        ({"backend": "smoke"}, "unknown backend 'smoke'.*nccl"),
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"timeout": "5"}, "timeout must be a positive number of seconds"),
    ],
)
def test_wrong_arguments_are_named(monkeypatch, arguments, message):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(InvalidArgumentError, match=message):
        dist.init_dist(**arguments)
    assert not c10d.is_initialized()


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [("pytorch", "RANK"), ("slurm", "SLURM_PROCID"), ("mpi", "OMPI_COMM_WORLD_RANK")],
)
def test_a_named_launcher_without_its_variables_says_which(launcher, variable):
    with pytest.raises(StateError, match=f"needs the variable {variable}"):
        dist.init_dist(launcher, backend="gloo")


def test_one_process_needs_no_launcher():
    for launcher in (None, dist.infer_launcher()):
        dist.init_dist(launcher)
        assert not dist.is_distributed()
    dist.cleanup_dist()
    dist.cleanup_dist()


@distributed_test(world_size=2, init=False)
def test_a_second_call_says_so_and_another_life_is_possible():
    dist.init_dist("pytorch", backend="gloo", timeout=45)
    with pytest.raises(StateError, match=r"has called init_dist\(\) before"):
        dist.init_dist("pytorch", backend="gloo")
    assert dist.get_timeout() == timedelta(seconds=45)
    dist.cleanup_dist()
    dist.cleanup_dist()
    assert not dist.is_distributed()
    assert dist.get_rank() == 0  # and no warning about the launch: it was initialised once
    dist.init_dist("pytorch", backend="gloo", timeout=timedelta(seconds=50))
    assert dist.get_timeout() == timedelta(seconds=50)
    assert ranks_sum() == 2


@distributed_test(world_size=2, init=False)
def test_another_life_waits_for_the_store_of_the_last_one_to_close():
    dist.init_dist("pytorch", backend="gloo", timeout=20)
    last_store = c10d.distributed_c10d._get_default_store()
    dist.cleanup_dist()
    if os.environ["RANK"] == "0":
        time.sleep(0.5)  # the other rank comes back to a store that is still open
        del last_store
    dist.init_dist("pytorch", backend="gloo", timeout=20)
    assert ranks_sum() == 2


def gloo_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads threads' names in /proc")
@distributed_test(world_size=2, init=False)
def test_no_thread_of_a_group_outlives_it():
    """One that does can abort a process which is ending: it may drop a tensor of Python's then."""
    dist.init_dist("pytorch", backend="gloo")
    importlib.reload(torch.distributed.nn.functional)  # optimizers import it late: it keeps groups
    circle = [c10d.group.WORLD, c10d.new_group()]  # as a model's references are
    circle.append(circle)
    del circle
    assert ranks_sum() == 2
    assert gloo_threads() != []
    dist.cleanup_dist()
    assert gloo_threads() == []
    dist.init_dist("pytorch", backend="gloo")
    with warnings.catch_warnings(action="ignore"):  # newer torch calls it deprecated
        assert torch.distributed.nn.functional.all_reduce(torch.ones(1)) == 2


@distributed_test(world_size=2)
def test_a_group_of_someone_else_is_taken_as_it_is():
    world = c10d.group.WORLD
    dist.init_dist(backend="gloo")
    assert c10d.group.WORLD is world
    with pytest.raises(StateError, match=r"has called init_dist\(\) before"):
        dist.init_dist(backend="gloo")
    dist.cleanup_dist()
    assert c10d.group.WORLD is world
    dist.init_dist(backend="gloo")
    dist.cleanup_dist()


@distributed_test(world_size=2, init=False)
def test_an_init_method_is_used(tmp_path):
    dist.init_dist("pytorch", backend="gloo", init_method=f"file://{tmp_path / 'store'}")
    assert ranks_sum() == 2


@distributed_test(world_size=2, init=False)
def test_a_tcp_method_under_torchruns_agent_is_refused():
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with pytest.raises(InvalidArgumentError, match="hangs under torchrun"):
        dist.init_dist("pytorch", backend="gloo", init_method="tcp://127.0.0.1:1")


def listening_addresses():
    """Addresses on which this process listens, as in /proc/net/tcp and tcp6."""
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@distributed_test(world_size=2, init=False)
def test_a_rendezvous_on_this_machine_listens_on_loopback_alone():
    dist.init_dist("pytorch", backend="gloo")
    assert ranks_sum() == 2
    addresses = listening_addresses()
    assert addresses or dist.get_rank() == 1
    assert set(addresses) <= {"0100007F"}


@distributed_test(world_size=2, init=False)
def test_two_processes_of_one_rank_are_found_out():
    placement = read_placement("pytorch")
    meeting = find_meeting(placement, None)
    store = open_store(placement, meeting, timedelta(seconds=20))
    if placement.rank == 1:
        with (
            mock.patch.object(rollcall, "_last_start", ""),  # as another process
            pytest.raises(StateError, match="another process has already joined as rank 1"),
        ):
            open_store(placement, meeting, timedelta(seconds=20))
        store.set("found out", "yes")
    else:
        store.get("found out")  # rank 0 holds the store until then


def slow(function, folder):
    """The function, slow to return on rank 1: ranks that are ready must not leave before."""

    def delayed(*args, **kwargs):
        result = function(*args, **kwargs)
        time.sleep(0.5 * int(os.environ["RANK"]))
        (folder / os.environ["RANK"]).touch()
        return result

    return delayed


@distributed_test(world_size=2, init=False)
def test_all_are_connected_when_init_dist_returns(tmp_path):
    with mock.patch.object(initialize, "create_group", slow(initialize.create_group, tmp_path)):
        dist.init_dist("pytorch", backend="gloo")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]


@distributed_test(world_size=1, init=False)
def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StateError, match=rf"cannot listen on 127.0.0.1 port {port}.*port="):
            dist.init_dist("pytorch", backend="gloo", port=port)
    assert os.environ["MASTER_PORT"] != str(port)
    dist.init_dist("pytorch", backend="gloo")


class Framework(types.ModuleType):
    """Records how a training framework was started."""

    def init_distributed(self, **kwargs):
        assert c10d.is_initialized()
        self.call = kwargs

    def launch_from_torch(self, backend):
        c10d.init_process_group(backend)
        self.call = {"backend": backend}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("deepspeed", {"dist_backend": "gloo", "auto_mpi_discovery": False}),
        ("colossalai", {"backend": "gloo"}),
    ],
)
@distributed_test(world_size=2, init=False)
def test_a_framework_takes_the_group_or_creates_it(name, call):
    sys.modules[name] = Framework(name)
    dist.init_dist("pytorch", backend="gloo", init_backend=name, timeout=77)
    assert sys.modules[name].call == call
    assert ranks_sum() == 2
    assert dist.get_timeout() == timedelta(seconds=77)


@pytest.mark.parametrize("name", ["deepspeed", "colossalai"])
@distributed_test(world_size=1, init=False)
def test_a_missing_framework_is_named(name):
    with pytest.raises(StateError, match=f"needs {name}: pip install {name}"):
        dist.init_dist("pytorch", backend="gloo", init_backend=name)


@distributed_test(world_size=2, init=False)
def test_a_launch_that_never_initialises_is_told_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert (dist.get_rank(), dist.get_world_size(), dist.is_main_process()) == (0, 1, True)
        dist.all_reduce(torch.ones(1))
    (message,) = (str(warning.message) for warning in caught)
    assert re.search(r"launched as one of 2.* init_dist\(\)", message)

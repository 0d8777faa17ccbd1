"""init_dist and cleanup_dist on real ranks, under every launcher's variables."""

import importlib
import os
import shutil
import socket
import sys
import tempfile
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
from scaletorch.dist import InvalidArgumentError, RankFailedError, StateError, devices
from scaletorch.dist.launchers.environment import read_placement
from scaletorch.dist.startup import rollcall
from scaletorch.dist.startup.creators import CREATORS
from scaletorch.dist.startup.rendezvous import find_meeting
from scaletorch.dist.startup.store import open_store
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
    return [
        (
            launcher,
            (rank, world_size),
            rank,
            world_size,
            "gloo",
            world_size,
            (rank, world_size, rank, world_size),
        )
        for rank in range(world_size)
    ]


def as_torchrun(launcher):
    dist.init_dist(launcher, backend="gloo")
    seen = look()
    dist.cleanup_dist()
    return seen


def as_mpirun(launcher, names):
    del os.environ["MASTER_ADDR"]
    rename(names)
    dist.init_dist(launcher, backend="gloo")
    seen = look()
    dist.cleanup_dist()
    assert "RANK" not in os.environ
    assert "MASTER_ADDR" not in os.environ
    return seen


def as_srun(launcher):
    size = os.environ["WORLD_SIZE"]
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    rank = rename(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None))
    os.environ |= {
        "SLURM_JOB_ID": str(os.getpgrp()),
        "SLURM_STEP_ID": "3",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": size,
        "SLURM_STEP_NODELIST": "virtual1",
    }
    dist.init_dist(launcher, backend="gloo")
    seen = look()
    dist.cleanup_dist()
    assert os.environ["SLURM_PROCID"] == str(rank)
    return seen


@pytest.mark.parametrize(("world_size", "launcher"), [(1, "pytorch"), (4, None)])
def test_torchruns_variables(world_size, launcher):
    assert run_ranks(as_torchrun, world_size, launcher, init=False) == expected(
        world_size, "pytorch"
    )


OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@pytest.mark.parametrize(("names", "launcher"), [(OPEN_MPI, "mpi"), (HYDRA, None)])
def test_mpiruns_variables(names, launcher):
    assert run_ranks(as_mpirun, 2, launcher, names, init=False) == expected(2, "mpi")


def test_sruns_variables():
    assert run_ranks(as_srun, 2, None, init=False) == expected(2, "slurm")


@distributed_test(world_size=4, init=False)
def test_local_places_come_from_host_names_where_the_launcher_is_silent():
    del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    dist.init_dist("pytorch", backend="gloo")
    rank = dist.get_rank()
    assert (dist.get_local_rank(), dist.get_local_size()) == (rank, 4)


@distributed_test(world_size=2, init=False)
def test_a_backend_that_is_not_here_falls_back_with_one_warning_of_one_rank():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_dist("pytorch", backend="nccl")
    assert len(caught) == (1 if dist.get_rank() == 0 else 0)
    for each in caught:
        message = str(each.message)
        assert (
            "backend 'nccl', the default, cannot be used: this machine has no cuda device"
            in message
        )
        assert message.endswith("Using 'gloo' instead; backend='gloo' asks for it")
    assert dist.get_backend() == "gloo"
    assert ranks_sum() == 2


@pytest.mark.parametrize("backend", ["hccl", "mpi"])
def test_every_backend_of_the_table_falls_back(backend):
    assert run_ranks(falls_back, 2, backend, init=False)[1] == "gloo"


def falls_back(backend):
    entry = devices.entry_of_backend(backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_dist("pytorch", backend=backend)
    entry = devices.entry_of_backend(entry.instead) or entry
    assert [entry.source in str(each.message) for each in caught] == [True] * (dist.get_rank() == 0)
    return dist.get_backend()


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
    with pytest.raises(StateError, match="called before in this process"):
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
    with pytest.raises(StateError, match="called before"):
        dist.init_dist(backend="gloo")
    dist.cleanup_dist()
    assert c10d.group.WORLD is world
    dist.init_dist(backend="gloo")
    dist.cleanup_dist()


@distributed_test(world_size=2, init=False)
def test_options_reach_torch():
    dist.init_dist("pytorch", backend="cpu:gloo", timeout=30, group_name="")
    assert dist.get_backend() == "gloo"
    assert ranks_sum() == 2


def meet_in_file(path):
    dist.init_dist("pytorch", backend="gloo", init_method=f"file://{path}")
    return ranks_sum()


def test_an_init_method_is_used(tmp_path):
    assert run_ranks(meet_in_file, 2, str(tmp_path / "store"), init=False) == [2, 2]


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


def notes():
    """Where the ranks of one test note what they have done."""
    folder = Path(tempfile.gettempdir()) / f"scaletorch-notes-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    return folder


def slow(function, folder):
    """The function, slow to return on rank 1: ranks that are ready must not leave before."""

    def delayed(*args, **kwargs):
        result = function(*args, **kwargs)
        time.sleep(0.5 * int(os.environ["RANK"]))
        (folder / os.environ["RANK"]).touch()
        return result

    return delayed


@distributed_test(world_size=2, init=False)
def test_all_are_connected_when_init_dist_returns():
    folder = notes()
    with mock.patch.dict(CREATORS, torch=slow(CREATORS["torch"], folder)):
        dist.init_dist("pytorch", backend="gloo")
    assert sorted(each.name for each in folder.iterdir()) == ["0", "1"]
    forget(folder)


def forget(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@distributed_test(world_size=1, init=False)
def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StateError, match=rf"cannot listen on 127.0.0.1 port {port}.*port="):
            dist.init_dist("pytorch", backend="gloo", port=port)
    assert os.environ["MASTER_PORT"] != str(port)
    dist.init_dist("pytorch", backend="gloo")


class FakeLibrary(types.ModuleType):
    """Records how a training framework was started."""

    def __init__(self):
        super().__init__("fake")
        self.calls = []

    def init_distributed(self, **kwargs):
        assert c10d.is_initialized()
        self.calls.append(kwargs)

    def launch_from_torch(self, backend):
        c10d.init_process_group(backend)
        self.calls.append({"backend": backend})


@distributed_test(world_size=2, init=False)
def test_deepspeed_takes_over_the_group():
    fake = sys.modules["deepspeed"] = FakeLibrary()
    dist.init_dist("pytorch", backend="gloo", init_backend="deepspeed")
    assert fake.calls == [{"dist_backend": "gloo", "auto_mpi_discovery": False}]
    assert ranks_sum() == 2


@distributed_test(world_size=2, init=False)
def test_colossalai_creates_the_group_itself():
    fake = sys.modules["colossalai"] = FakeLibrary()
    dist.init_dist("pytorch", backend="gloo", init_backend="colossalai", timeout=77)
    assert fake.calls == [{"backend": "gloo"}]
    assert ranks_sum() == 2
    assert dist.get_timeout() == timedelta(seconds=77)


def with_library(name):
    dist.init_dist("pytorch", backend="gloo", init_backend=name)


@pytest.mark.parametrize("name", ["deepspeed", "colossalai"])
def test_a_missing_framework_is_named(name):
    with pytest.raises(RankFailedError, match=f"needs {name}: pip install {name}"):
        run_ranks(with_library, 1, name, init=False)


def forget_to_initialise():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = dist.get_rank(), dist.get_world_size(), dist.is_main_process()
    return values, [str(warning.message) for warning in caught]


def test_a_launch_that_never_initialises_is_told_once():
    for values, messages in run_ranks(forget_to_initialise, 2, init=False):
        assert values == (0, 1, True)
        assert len(messages) == 1
        assert "launched as one of 2" in messages[0]
        assert "init_dist()" in messages[0]

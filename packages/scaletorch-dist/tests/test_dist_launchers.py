"""Launcher environments as data: who started this process, and where it says we are."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletorch.dist import StateError, infer_launcher, init_dist, is_distributed
from scaletorch.dist.startup import rendezvous, slurm
from scaletorch.dist.startup.interfaces import is_loopback
from scaletorch.dist.startup.launchers import (
    ENVIRONMENTS,
    Placement,
    launched_world_size,
    read_placement,
)
from scaletorch.dist.startup.rendezvous import Meeting, derived_port, find_meeting
from scaletorch.dist.startup.slurm import expand_tasks_per_node, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "localhost[1-4]",
}
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
SRUN_WITH_PMI2 = SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"}
# What mpirun's processes see inside an allocation: Slurm describes the program that mpirun is.
MPIRUN_IN_SLURM = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.fixture
def launched_by(monkeypatch):
    """Set the variables of a launcher, and no others."""

    def set_variables(variables):
        for name in list(os.environ):
            if name.startswith(("SLURM", "OMPI", "PMI", "MASTER", "MPI")):
                monkeypatch.delenv(name)
        for name in TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "none"),
        (TORCHRUN, "pytorch"),
        (OPEN_MPI, "mpi"),
        (HYDRA, "mpi"),
        (SRUN, "slurm"),
        (BATCH, "none"),
        (SRUN_WITH_PMI2, "slurm"),
        (MPIRUN_IN_SLURM | OPEN_MPI, "mpi"),
        (MPIRUN_IN_SLURM | HYDRA, "mpi"),
        (MPIRUN_IN_SLURM | TORCHRUN, "pytorch"),
        ({"RANK": "0"}, "none"),
    ],
)
def test_the_launcher_is_inferred(launched_by, variables, launcher):
    launched_by(variables)
    assert infer_launcher() == launcher
    assert launched_world_size() == (1 if launcher == "none" else 8)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [("pytorch", TORCHRUN), ("mpi", OPEN_MPI), ("mpi", HYDRA), ("slurm", SRUN)],
)
def test_every_environment_gives_the_same_place(launched_by, launcher, variables):
    launched_by(variables)
    place = read_placement(launcher)
    assert place == Placement(place.program, launcher, 3, 8, 1, 2)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.program)
def test_a_missing_variable_is_named(launched_by, environment):
    launched_by({})
    with pytest.raises(StateError, match=rf"{environment.launcher}.* needs the variable "):
        read_placement(environment.launcher)
    launched_by({environment.rank: "0"})
    with pytest.raises(StateError, match=environment.world_size):
        read_placement(environment.launcher)


def test_a_batch_script_without_srun_is_told_so(launched_by):
    launched_by(BATCH)
    with pytest.raises(StateError, match=r"straight from the batch script. Start it with srun"):
        read_placement("slurm")


def test_a_batch_script_without_srun_is_told_so_when_no_launcher_is_named(launched_by):
    launched_by(BATCH)
    with pytest.raises(StateError, match=r"asks for 8 tasks.* start it with srun.*--ntasks=1"):
        init_dist()


@pytest.mark.parametrize("variables", [BATCH | {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "8"}])
def test_one_process_in_a_slurm_job_needs_no_launcher(launched_by, variables):
    launched_by(variables)
    init_dist()
    assert not is_distributed()


def test_a_variable_that_is_no_number_is_shown(launched_by):
    launched_by(TORCHRUN | {"RANK": "first"})
    with pytest.raises(StateError, match="RANK must be a number, but is 'first'"):
        read_placement("pytorch")


def test_local_variables_may_be_missing(launched_by):
    launched_by({"RANK": "1", "WORLD_SIZE": "2"})
    place = read_placement("pytorch")
    assert (place.local_rank, place.local_size) == (None, None)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2", [2]), ("2,1", [2, 1]), ("2(x3)", [2, 2, 2]), ("4(x2),1,3(x1)", [4, 4, 1, 3]), ("", [])],
)
def test_tasks_per_node_are_expanded(text, sizes):
    assert expand_tasks_per_node(text) == sizes


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1))
def test_tasks_per_node_survive_the_short_form(runs):
    text = ",".join(f"{size}(x{times})" if times > 1 else str(size) for size, times in runs)
    expected = [size for size, times in runs for _ in range(times)]
    assert expand_tasks_per_node(text) == expected


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-03,07]", "node01"),
        ("gpu[7,9],login", "gpu7"),
        ("rack[2-3]n[004-008]", "rack2n004"),
        ("a.b.c,d", "a.b.c"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_an_empty_node_list_is_refused():
    with pytest.raises(StateError, match="node list"):
        first_host("")


def test_slurm_meets_at_the_first_node_that_resolves(launched_by, monkeypatch):
    launched_by(SRUN)
    monkeypatch.setattr(slurm.socket, "getaddrinfo", lambda host, port: [host])
    meeting = find_meeting(read_placement("slurm"), None)
    assert meeting == Meeting("localhost1", derived_port("17.0"))


def test_slurm_steps_take_other_ports(launched_by):
    ports = set()
    for step in ("0", "1"):
        launched_by(SRUN | {"SLURM_STEP_ID": step, "MASTER_ADDR": "host"})
        ports.add(find_meeting(read_placement("slurm"), None).port)
    assert len(ports) == 2
    assert all(1024 < port < 32768 for port in ports)


def unresolvable(host, port):
    raise OSError(f"no such host: {host}")


def test_slurm_asks_scontrol_for_names_that_do_not_resolve(launched_by, monkeypatch, tmp_path):
    launched_by(SRUN | {"SLURM_STEP_NODELIST": "virtual[1-2]"})
    monkeypatch.setattr(slurm.socket, "getaddrinfo", unresolvable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StateError, match=r"virtual1.*MASTER_ADDR"):
        find_meeting(read_placement("slurm"), None)
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "NodeName=$4 Arch=x NodeAddr=10.0.0.7 State=IDLE"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert find_meeting(read_placement("slurm"), 1234) == Meeting("10.0.0.7", 1234)


def test_slurm_on_one_node_meets_on_loopback(launched_by):
    launched_by(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"})
    assert find_meeting(read_placement("slurm"), 1234) == Meeting("127.0.0.1", 1234)


def test_what_the_caller_says_comes_first(launched_by):
    launched_by(SRUN | {"MASTER_ADDR": "chosen", "MASTER_PORT": "4000"})
    assert find_meeting(read_placement("slurm"), None) == Meeting("chosen", 4000)
    assert find_meeting(read_placement("slurm"), 5000) == Meeting("chosen", 5000)


def test_mpi_on_one_node_agrees_on_a_port_without_talking(launched_by):
    one_node = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    launched_by(one_node | {"PMIX_NAMESPACE": "prterun-host-4711@1"})
    first = find_meeting(read_placement("mpi"), None)
    assert first == find_meeting(read_placement("mpi"), None)
    launched_by(one_node | {"PMIX_NAMESPACE": "prterun-host-4712@1"})
    second = find_meeting(read_placement("mpi"), None)
    assert first.address == second.address == "127.0.0.1"
    assert first.port != second.port


def no_module(name):
    raise ImportError(name)


class FakeWorld:
    """As much of mpi4py's COMM_WORLD as a meeting needs."""

    def __init__(self, size):
        self.size = size

    def Get_size(self):
        return self.size

    def bcast(self, value, root):
        assert root == 0
        return value


class FakeMpi:
    def __init__(self, size):
        self.COMM_WORLD = FakeWorld(size)


def test_mpi_on_several_nodes_needs_an_address_or_mpi4py(launched_by, monkeypatch):
    launched_by(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})
    monkeypatch.setattr(rendezvous.importlib, "import_module", no_module)
    with pytest.raises(StateError, match=r"MASTER_ADDR.*or install mpi4py"):
        find_meeting(read_placement("mpi"), None)
    monkeypatch.setattr(rendezvous.importlib, "import_module", lambda name: FakeMpi(1))
    with pytest.raises(StateError, match="mpi4py sees 1 ranks"):
        find_meeting(read_placement("mpi"), None)
    monkeypatch.setattr(rendezvous.importlib, "import_module", lambda name: FakeMpi(8))
    meeting = find_meeting(read_placement("mpi"), None)
    with meeting.listener as listener:
        assert listener.getsockname()[1] == meeting.port


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "x"}, "MASTER_PORT"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR"),
    ],
)
def test_torchruns_missing_address_is_named(launched_by, variables, missing):
    launched_by(TORCHRUN | variables)
    with pytest.raises(StateError, match=f"needs {missing} in the environment"):
        find_meeting(read_placement("pytorch"), None)


def test_a_port_that_is_no_number_is_shown(launched_by):
    launched_by(TORCHRUN | {"MASTER_ADDR": "x", "MASTER_PORT": "http"})
    with pytest.raises(StateError, match="MASTER_PORT must be a number, but is 'http'"):
        find_meeting(read_placement("pytorch"), None)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node1", False),
        ("::", False),
    ],
)
def test_loopback_is_told_by_the_address_alone(address, loopback):
    assert is_loopback(address) is loopback

"""Launchers' variables: who started this process, which rank it is, and where ranks meet."""

import os
import re
import stat
import sys
from types import SimpleNamespace

import pytest

from scaletorch.dist import StateError, infer_launcher, init_dist, is_distributed, launchers
from scaletorch.dist.launchers import (
    ENVIRONMENTS,
    Placement,
    gloo_interface,
    is_loopback,
    launched_world_size,
    read_placement,
)
from scaletorch.dist.startup import rendezvous
from scaletorch.dist.startup.rendezvous import Meeting, derived_port, find_meeting, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_STEP_NODELIST": "localhost[1-4]",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
SRUN_WITH_PMI2 = SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"}
# What mpirun's processes see inside an allocation: Slurm describes the program that mpirun is.
MPIRUN_IN_SLURM = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.fixture
def launched_by(monkeypatch):
    """Set the variables of a launcher, and no others."""

    def set_variables(variables):
        for name in list(os.environ):
            if name.startswith(("SLURM", "OMPI", "PMI", "MASTER", "MPI", "TORCHELASTIC")):
                monkeypatch.delenv(name)
        for name in TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "none"), (TORCHRUN, "pytorch"), (OPEN_MPI, "mpi"), (HYDRA, "mpi"), (SRUN, "slurm"),
        (BATCH, "none"), (SRUN_WITH_PMI2, "slurm"), (MPIRUN_IN_SLURM | OPEN_MPI, "mpi"),
        (MPIRUN_IN_SLURM | HYDRA, "mpi"), (MPIRUN_IN_SLURM | TORCHRUN, "pytorch"),
        ({"RANK": "0"}, "none"),
    ],
)  # fmt: skip
def test_the_launcher_is_inferred_and_gives_the_place(launched_by, variables, launcher):
    launched_by(variables)
    assert infer_launcher() == launcher
    if launcher == "none":
        assert launched_world_size() == 1
    else:
        assert launched_world_size() == 8
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
    with pytest.raises(StateError, match=r"needs the variable SLURM_STEP_NUM_TASKS, which srun"):
        read_placement("slurm")
    with pytest.raises(StateError, match=r"asks for 8 tasks.* start it with srun.*--ntasks=1"):
        init_dist()


@pytest.mark.parametrize("variables", [BATCH | {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "8"}])
def test_one_process_in_a_slurm_job_needs_no_launcher(launched_by, variables):
    launched_by(variables)
    init_dist()
    assert not is_distributed()


def test_slurm_meets_at_the_first_node_that_resolves(launched_by, monkeypatch):
    launched_by(SRUN)
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda host, port: [host])
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
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", unresolvable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StateError, match=r"virtual1.*MASTER_ADDR"):
        find_meeting(read_placement("slurm"), None)
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "NodeName=$4 Arch=x NodeAddr=10.0.0.7 State=IDLE"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert find_meeting(read_placement("slurm"), 1234) == Meeting("10.0.0.7", 1234)


def test_slurm_meets_on_loopback_on_one_node_or_where_the_caller_says(launched_by):
    launched_by(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"})
    assert find_meeting(read_placement("slurm"), 1234) == Meeting("127.0.0.1", 1234)
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


def mpi4py_of(size):
    """As much of mpi4py.MPI as a meeting needs."""
    world = SimpleNamespace(Get_size=lambda: size, bcast=lambda value, root: value)
    return SimpleNamespace(COMM_WORLD=world)


def test_mpi_on_several_nodes_needs_an_address_or_mpi4py(launched_by, monkeypatch):
    launched_by(HYDRA | {"MASTER_ADDR": "host", "MASTER_PORT": "7"})
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    assert find_meeting(read_placement("mpi"), None) == Meeting("host", 7)
    launched_by(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(StateError, match=r"does not say where rank 0 is.*or install mpi4py"):
        find_meeting(read_placement("mpi"), None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi4py_of(1))
    with pytest.raises(StateError, match="mpi4py sees 1 ranks"):
        find_meeting(read_placement("mpi"), None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi4py_of(8))
    meeting = find_meeting(read_placement("mpi"), None)
    with meeting.listener as listener:
        assert listener.getsockname()[1] == meeting.port


ADDRESS = {"MASTER_ADDR": "x", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "needs MASTER_ADDR and MASTER_PORT in the env"),
        ({"MASTER_PORT": ""}, "needs MASTER_PORT in the environment"),
        ({"MASTER_ADDR": ""}, "needs MASTER_ADDR in the environment"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a number, but is 'http'"),
        ({"RANK": "first"}, "RANK must be a number, but is 'first'"),
    ],
)
def test_a_wrong_variable_of_torchrun_is_named(launched_by, changes, message):
    variables = TORCHRUN | ADDRESS | changes
    launched_by({name: value for name, value in variables.items() if value})
    with pytest.raises(StateError, match=message):
        find_meeting(read_placement("pytorch"), None)


def test_loopback_is_told_by_the_address_alone():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "node1", "::")))


def test_gloo_stays_on_loopback_where_all_ranks_are_here():
    for address, one_machine in (("127.0.0.1", False), ("node1", True)):
        assert gloo_interface(address, one_machine) in ("lo", "lo0", None)


NAMED = {"node1": "10.0.0.7", "here": "127.0.1.1"}


def resolve(host, port):
    return [(None, None, None, "", (NAMED[host], 0))]


@pytest.mark.parametrize(
    ("own_name", "towards", "interface"),
    [
        ("node1", "10.0.0.7", None),  # gloo's own choice is good
        ("here", "10.0.0.7", "net1"),  # the host's name leads to loopback
        ("here", "127.0.1.1", "net0"),  # and on rank 0, rank 0's name too
    ],
)
def test_gloo_is_told_an_interface_where_the_hosts_name_leads_nowhere(
    monkeypatch, own_name, towards, interface
):
    own = {"node1": towards}
    addresses = {"lo": "127.0.0.1", "net0": "10.9.0.1", "net1": "10.0.0.7", "down": ""}
    monkeypatch.setattr(launchers.socket, "gethostname", lambda: own_name)
    monkeypatch.setattr(launchers.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(launchers, "own_address", lambda to="elsewhere": own.get(to, "10.9.0.1"))
    monkeypatch.setattr(launchers.socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(launchers, "_address_of", addresses.__getitem__)
    assert gloo_interface("node1", one_machine=False) == interface


# What Kubeflow's operators set in a pod's container.
PYTORCH_JOB = {
    "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456",
    "WORLD_SIZE": "4", "PET_NNODES": "4", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip


def test_a_pod_of_a_pytorchjob_is_one_rank(launched_by):
    launched_by(PYTORCH_JOB | {"RANK": "3"})
    place = read_placement(infer_launcher())
    assert place == Placement("torchrun", "pytorch", 3, 4, None, None)
    assert find_meeting(place, None) == Meeting("train-master-0", 23456)
    assert gloo_interface("train-master-0", False) != "lo"
    launched_by(PYTORCH_JOB | TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    place = read_placement("pytorch")  # of torchrun in a pod
    assert place == Placement("torchrun", "pytorch", 3, 8, 1, 2)
    assert find_meeting(place, 7) == Meeting("train-master-0", 23456, by_agent=True)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.program)
def test_a_rank_outside_the_world_is_refused(launched_by, environment):
    launched_by({environment.rank: "4", environment.world_size: "4"})
    message = f"{environment.rank}=4 is not a rank of {environment.world_size}=4"
    with pytest.raises(StateError, match=message):
        read_placement(environment.launcher)


HOSTS = [
    ("node1", "node1"), ("node1,node2", "node1"), ("node[01-03,07]", "node01"),
    ("a1,b[2-3]x", "a1"), ("b[2-3]x,a1", "b2x"), ("gpu[7,9],login", "gpu7"),
    ("rack[2-3]n[004-005]", "rack2n004"), ("n[098-101]", "n098"), ("n[8-11]", "n8"),
    ("a.b.c,d-e", "a.b.c"), ("d-e,a.b.c", "d-e"), ("10.0.0.[1-2], 10.0.0.9", "10.0.0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "host"), HOSTS)
def test_the_first_host_of_slurms_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", " ", ",", "a,", "a[1", "a1]", "a[]", "a[1,]", "]["])
def test_a_broken_host_list_is_shown(nodes):
    with pytest.raises(StateError, match=re.escape(f"cannot read the node list {nodes!r}")):
        first_host(nodes)

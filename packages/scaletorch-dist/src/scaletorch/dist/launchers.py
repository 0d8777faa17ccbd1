"""A process's launcher and rank, from environment variables, and its network interface for gloo.

By default gloo resolves the host's own name.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
import sys
from dataclasses import dataclass

from .errors import StateError

LAUNCHERS = ("pytorch", "slurm", "mpi")
LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # gloo on it accepts only this machine
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """The names of the variables that one program sets for each process it starts."""

    program: str  # the program that the user ran
    launcher: str  # its name in `init_dist`
    rank: str
    world_size: str
    local_rank: str
    local_size: str


# Tried in this order: torchrun may run inside mpirun or srun, and mpirun inside a Slurm allocation;
# the outer launcher's variables then describe other processes.
ENVIRONMENTS = (
    LauncherEnvironment("torchrun", "pytorch",
                        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    LauncherEnvironment("mpirun of Open MPI", "mpi",
                        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    LauncherEnvironment("mpirun of MPICH (Hydra)", "mpi",
                        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    LauncherEnvironment("srun", "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                        "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """This process's rank and world size as given by its launcher; None for missing values."""

    program: str
    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None


def find_environment() -> LauncherEnvironment | None:
    """Return the variables of the launcher that started this process, or None."""
    env = os.environ
    for environment in ENVIRONMENTS:
        if environment.rank in env and environment.world_size in env:
            if environment.rank == "PMI_RANK" and _is_srun_pmi():
                continue
            return environment
    return None


def _is_srun_pmi() -> bool:
    """Return whether srun itself set PMI variables (`--mpi=pmi2`): they then equal Slurm's."""
    env = os.environ
    return (
        env["PMI_SIZE"] == env.get("SLURM_STEP_NUM_TASKS")
        and env["PMI_RANK"] == env.get("SLURM_PROCID")
        and "MPI_LOCALRANKID" not in env
    )


# The launcher that init_dist used. It exports torchrun's variables, which would hide the launcher.
_known: str | None = None


def infer_launcher() -> str:
    """Return the launcher that started this process: 'pytorch', 'slurm', 'mpi', or 'none'."""
    if _known is not None:
        return _known
    environment = find_environment()
    return "none" if environment is None else environment.launcher


def remember_launcher(launcher: str | None) -> None:
    """Set the result of `infer_launcher`; None makes it read the environment again."""
    global _known
    _known = launcher


def refuse_batch_script_of_many() -> None:
    """Raise if a Slurm job has several tasks but no launcher started this process."""
    env = os.environ
    tasks = env.get("SLURM_NTASKS", "")
    in_batch_script = "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" not in env
    if in_batch_script and tasks.isdecimal() and int(tasks) > 1:
        raise StateError(
            f"this job of Slurm asks for {tasks} tasks, but this program runs once, straight from "
            "the batch script: start it with srun, torchrun or mpirun; or, if one process is meant "
            "(it may start local ranks itself), ask for --ntasks=1"
        )


def launched_world_size() -> int:
    """Return the number of processes that the launcher started, or 1 without a launcher."""
    environment = find_environment()
    size = "1" if environment is None else os.environ[environment.world_size]
    return int(size) if size.isdecimal() else 1


def read_placement(launcher: str) -> Placement:
    """Read this process's placement from a launcher's variables."""
    env = os.environ
    environment = find_environment()
    if environment is None or environment.launcher != launcher:
        candidates = [e for e in ENVIRONMENTS if e.launcher == launcher]
        partly_set = [e for e in candidates if e.rank in env or e.world_size in env]
        environment = (partly_set or candidates)[0]
    rank = _number(environment.rank, environment)
    world_size = _number(environment.world_size, environment)
    if rank >= world_size:
        raise StateError(
            f"{environment.rank}={rank} is not a rank of {environment.world_size}={world_size}: "
            "ranks count from 0"
        )
    return Placement(
        environment.program,
        launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_optional_number(environment.local_rank),
        local_size=_local_size(environment),
    )


def job_name(placement: Placement) -> str:
    """Return a name that only the ranks of one start share, or "" if there is none."""
    env = os.environ
    names = {"pytorch": "TORCHELASTIC_RUN_ID", "slurm": "SLURM_JOB_ID", "mpi": "PMIX_NAMESPACE"}
    name = env.get(names[placement.launcher], "")
    if placement.launcher == "slurm":  # a job has many steps
        name += f".{env.get('SLURM_STEP_ID')}"
    return name


def _number(name: str, environment: LauncherEnvironment) -> int:
    value = os.environ.get(name)
    if value is None:
        raise StateError(
            f"launcher {environment.launcher!r} needs the variable {name}, which "
            f"{environment.program} sets and which is missing here: start this program with "
            f"{environment.program}, or call init_dist with the launcher you used "
            f"({', '.join(map(repr, LAUNCHERS))})"
        )
    if not value.isdecimal():
        raise StateError(f"the variable {name} must be a number, but is {value!r}")
    return int(value)


def _optional_number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _local_size(environment: LauncherEnvironment) -> int | None:
    if environment.launcher != "slurm":
        return _optional_number(environment.local_size)
    # Slurm's short form: "2(x3),1" for 2, 2, 2, 1.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get(environment.local_size, ""))
    sizes = [int(count) for count, times in runs for _ in range(int(times or 1))]
    node = _optional_number("SLURM_NODEID") or 0
    return sizes[node] if node < len(sizes) else None


def is_loopback(address: str) -> bool:
    """Return whether an address is loopback by its text alone, without name resolution.

    A host's own name does not count: it often resolves to loopback on that host only.
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def gloo_interface(address: str, one_machine: bool) -> str | None:
    """Return the interface to set for gloo, given rank 0's address, or None if its default works.

    By default gloo uses the address to which this host's name resolves. If that is loopback or does
    not exist (a container, Debian's 127.0.1.1), ranks of other machines could not connect.
    """
    if one_machine or is_loopback(address):
        return LOOPBACK.get(sys.platform)
    with contextlib.suppress(OSError):  # the host's own name does not resolve
        if not is_loopback(str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])):
            return None
    own = own_address(address)
    if is_loopback(own):  # on rank 0, whose own name resolves to loopback
        own = own_address()
    names = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else []
    return next((name for name in names if _address_of(name) == own), None)


def own_address(towards: str = "192.0.2.1") -> str:
    """Return this machine's address on the route to another one; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no such name or route: connecting to the store will report it
        return "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl  # only reached on Linux

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
        except OSError:  # an interface without an address
            return ""
    return socket.inet_ntoa(answer[20:24])

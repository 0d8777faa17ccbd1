"""Launcher environments as data: which variables tell a process its place."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import StateError
from .slurm import expand_tasks_per_node

LAUNCHERS = ("pytorch", "slurm", "mpi")


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """The variables that one program sets for each process it starts.

    Attributes:
        program: What the user started.
        launcher: The `init_dist` launcher it belongs to.
        rank: Variable of the rank.
        world_size: Variable of the number of ranks.
        local_rank: Variable of the rank among those of this node.
        local_size: Variable of the number of ranks on this node.
    """

    program: str
    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str


# In the order in which they are tried: torchrun may run inside mpirun or srun, mpirun inside an
# allocation of Slurm, whose variables then describe the wrong processes.
ENVIRONMENTS = (
    LauncherEnvironment(
        "torchrun", "pytorch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    ),
    LauncherEnvironment(
        "mpirun of Open MPI",
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherEnvironment(
        "mpirun of MPICH (Hydra)",
        "mpi",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    LauncherEnvironment(
        "srun",
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of this process, as its launcher says; fields are None if it does not say."""

    program: str
    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None


def find_environment() -> LauncherEnvironment | None:
    """The environment of the launcher that started this process, or None."""
    env = os.environ
    for environment in ENVIRONMENTS:
        if environment.rank in env and environment.world_size in env:
            if environment.rank == "PMI_RANK" and _is_srun_pmi():
                continue
            return environment
    return None


def _is_srun_pmi() -> bool:
    """Return whether srun itself speaks PMI (`--mpi=pmi2`): both sets of variables agree then."""
    env = os.environ
    return (
        env["PMI_SIZE"] == env.get("SLURM_STEP_NUM_TASKS")
        and env["PMI_RANK"] == env.get("SLURM_PROCID")
        and "MPI_LOCALRANKID" not in env
    )


# The launcher that init_dist went by; it then exports torchrun's variables.
_known: str | None = None


def infer_launcher() -> str:
    """The launcher that started this process: 'pytorch', 'slurm', 'mpi', or 'none'."""
    if _known is not None:
        return _known
    environment = find_environment()
    return "none" if environment is None else environment.launcher


def remember_launcher(launcher: str | None) -> None:
    """Keep what `infer_launcher` is to answer; None to look at the environment again."""
    global _known
    _known = launcher


def refuse_batch_script_of_many() -> None:
    """Refuse to go on if a Slurm job has many tasks and no launcher started this process.

    Raises:
        StateError: This is the batch script's own process in a job of several tasks.
    """
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
    """Return the number of processes that the launcher started; 1 without a launcher."""
    environment = find_environment()
    size = "1" if environment is None else os.environ[environment.world_size]
    return int(size) if size.isdecimal() else 1


def read_placement(launcher: str) -> Placement:
    """Read this process's place from the variables of a launcher.

    Raises:
        StateError: A variable is missing or no number, or the rank is outside the world.
    """
    env = os.environ
    environment = find_environment()
    if environment is None or environment.launcher != launcher:
        candidates = [e for e in ENVIRONMENTS if e.launcher == launcher]
        set_in_part = [e for e in candidates if e.rank in env or e.world_size in env]
        environment = (set_in_part or candidates)[0]
    rank = _number(environment.rank, environment)
    world_size = _number(environment.world_size, environment)
    if rank >= world_size:
        raise StateError(
            f"{environment.rank}={rank} is no rank of {environment.world_size}={world_size}: ranks "
            "count from 0"
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
    """Return a name that only the ranks of one start share; "" if unknown."""
    env = os.environ
    names = {
        "pytorch": "TORCHELASTIC_RUN_ID",
        "slurm": "SLURM_JOB_ID",
        "mpi": "PMIX_NAMESPACE",
    }
    name = env.get(names[placement.launcher], "")
    if placement.launcher == "slurm":  # a job has many steps
        name += f".{env.get('SLURM_STEP_ID')}"
    return name


def _number(name: str, environment: LauncherEnvironment) -> int:
    value = os.environ.get(name)
    if value is None and environment.launcher == "slurm" and "SLURM_PROCID" in os.environ:
        raise StateError(
            f"launcher 'slurm' needs {name}, which srun sets: this program runs in a job of Slurm, "
            "but once, straight from the batch script. Start it with srun"
        )
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
    sizes = expand_tasks_per_node(os.environ.get(environment.local_size, ""))
    node = _optional_number("SLURM_NODEID") or 0
    return sizes[node] if node < len(sizes) else None

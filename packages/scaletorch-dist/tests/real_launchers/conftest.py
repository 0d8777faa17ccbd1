"""Starts what real launchers need, for tests that skip where it is not installed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from scaletorch.dist.startup.rendezvous import free_port

PROGRAMS = Path(__file__).parent / "programs"
SLURM_CONF = """
ClusterName=scaletorch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=2
NodeName=virtual1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=virtual2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=test Nodes=virtual[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def need(*programs):
    """Skip unless all programs are there and this is root."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can start it")


class Launch:
    """Runs commands with this interpreter's packages, and ends what outlives them."""

    def __init__(self, folder):
        self.folder = folder
        self.running = []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" is this one
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}

    def start(self, command, cwd=None, **variables):
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.variables, **variables},
            cwd=cwd or self.folder,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def finish(self, *processes, timeout=90):
        """Wait for them; (exit status, stdout, stderr) of each, all ended after the timeout."""
        deadline = time.monotonic() + timeout
        results = []
        for process in processes:
            try:
                out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.end()
                out, err = process.communicate()
                err += f"\nended by the test after {timeout} s"
            results.append((process.returncode, out, err))
        return results

    def run(self, command, timeout=90, cwd=None, **variables):
        return self.finish(self.start(command, cwd, **variables), timeout=timeout)[0]

    def batch(self, slurm, words, **variables):
        """Run a batch script, the last word, as users do; (the job's exit status, its output)."""
        output = self.folder / "output"
        command = ["sbatch", "--parsable", f"--output={output}", *words]
        status, job, err = self.run(command, cwd=words[-1].parent, **slurm, **variables)
        assert status == 0, err
        deadline = time.monotonic() + 80
        while time.monotonic() < deadline:  # sbatch --wait asks at ever longer intervals
            _, shown, _ = self.run(["scontrol", "-o", "show", "job", job.strip()], **slurm)
            state, code = re.search(r"JobState=(\w+).* ExitCode=(\d+):", shown).groups()
            if state not in ("PENDING", "RUNNING", "COMPLETING"):
                return int(code), output.read_text()
            time.sleep(0.2)
        self.run(["scancel", job.strip()], **slurm)
        pytest.fail(f"the job does not end: {shown}\n{output.read_text()}")

    def end(self):
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def places(self):
        """What the ranks of programs/place.py wrote."""
        files = sorted(self.folder.iterdir(), key=lambda path: path.name)
        return [path.read_text() for path in files if path.name.isdecimal()]


@pytest.fixture(name="free_port")
def a_free_port():
    return str(free_port())


@pytest.fixture
def launch(tmp_path):
    running = Launch(tmp_path)
    yield running
    running.end()


@pytest.fixture(scope="session")
def programs():
    return PROGRAMS


@pytest.fixture(scope="session")
def examples():
    """The scripts that users copy; they are in the repository, not in the package."""
    folder = next(
        (p / "examples" / "launchers" for p in PROGRAMS.parents if (p / ".ci").exists()), None
    )
    if folder is None:
        pytest.skip("the examples are in the repository alone")
    return folder


def installed(name):
    """The environment of a launcher, as the workspace's hatch environment of its name makes it."""
    root = next((p for p in PROGRAMS.parents if (p / ".ci").exists()), PROGRAMS)
    folder = root / ".launchers" / name
    if not folder.exists():
        pytest.skip(f"not installed: hatch env create {name}")
    return folder, next(folder.glob("lib/python3*/site-packages"))


def python_path(*folders):
    own = os.environ.get("PYTHONPATH", "").split(":")
    return ":".join([*filter(None, own), *map(str, folders)])


def mpi4py_of(kind):
    """The folder of an MPI, and variables with which mpi4py uses it."""
    folder, packages = installed(kind)
    library = next(folder.glob("lib/libmpi.so.*"))
    return folder, {"PYTHONPATH": python_path(packages), "MPI4PY_LIBMPI": str(library)}


@pytest.fixture
def open_mpi4py():
    return mpi4py_of("openmpi")[1]


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request):
    """An mpirun: its kind, the command, variables that it needs, and those that give mpi4py."""
    folder, with_mpi4py = mpi4py_of(request.param)
    command, variables = [folder / "bin" / "mpirun"], {}
    if request.param == "openmpi":
        command.append("--oversubscribe")
        names = [f"{p}_ALLOW_RUN_AS_ROOT{s}" for p in ("OMPI", "PRTE") for s in ("", "_CONFIRM")]
        variables = dict.fromkeys(names, "1")
    return request.param, command, variables, with_mpi4py


@pytest.fixture(scope="session")
def ray():
    """Variables with which Ray can be imported."""
    _, packages = installed("ray")
    return {"PYTHONPATH": python_path(packages), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="session")
def torchrun():
    return [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"]


@pytest.fixture(scope="session")
def two_hosts():
    """Two network namespaces with one cable between them: (name, address) of each."""
    need("ip")
    key = f"scale{os.getpid()}"
    hosts = [(f"{key}{letter}", f"10.213.7.{n}") for n, letter in ((1, "a"), (2, "b"))]
    commands = [f"ip netns add {name}" for name, _ in hosts]
    (one, _), (other, _) = hosts
    commands.append(f"ip link add eth0 netns {one} type veth peer name eth0 netns {other}")
    for name, address in hosts:
        commands.append(f"ip -n {name} address add {address}/24 dev eth0")
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "eth0")]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: {command}: {done.stderr.strip()}")
        yield hosts
    finally:
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture(scope="session")
def slurm():
    """A Slurm of our own with two virtual nodes; the variables that its clients need."""
    need("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # sockets want short paths
    daemons = []
    try:
        yield start_slurm(folder, daemons)
    finally:
        for daemon in reversed(daemons):
            daemon.kill()  # asked to end, they wait for one another
            daemon.wait()
        shutil.rmtree(folder)


def start_slurm(folder, daemons):
    ports = []
    while len({*ports}) < 3:
        ports = [free_port() for _ in range(3)]
    conf = SLURM_CONF.format(folder=folder, ports=ports, host=socket.gethostname())
    (folder / "slurm.conf").write_text(conf)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    options = ("socket", "key-file", "pid-file", "log-file", "seed-file")
    names = ("munge.socket", "munge.key", "munge.pid", "munge.log", "munge.seed")
    munged = [f"--{option}={folder / name}" for option, name in zip(options, names, strict=True)]
    config = ["-D", "-f", str(folder / "slurm.conf")]
    commands = [["munged", "--foreground", "--force", *munged], ["slurmctld", "-c", *config]]
    commands += [["slurmd", *config, "-N", f"virtual{node}"] for node in (1, 2)]
    for command in commands:
        daemons.append(subprocess.Popen(command, stdout=-3, stderr=-3, cwd=folder))
        if command[0] == "munged":
            wait_for(lambda: (folder / "munge.socket").exists(), folder)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    wait_for(lambda: idle_nodes(variables) == 2, folder)
    return variables


def idle_nodes(variables):
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    env = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)
    return done.stdout.split().count("idle")


def wait_for(ready, folder, timeout=30):
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
            pytest.fail(f"Slurm does not start:\n{logs}")
        time.sleep(0.1)

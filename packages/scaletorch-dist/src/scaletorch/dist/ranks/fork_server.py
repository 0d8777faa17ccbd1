"""The fork-server, a single-threaded process that has imported torch, and the ranks that it forks.

It runs as a separate process (`serve`), imports shared modules once, and forks one rank per
request. Unlike multiprocessing's fork-server it never runs the caller's `__main__`, uses the
caller's `sys.path`, changes no setting of the caller, and ends with all its ranks when the caller
does. A rank (`main`) applies the caller's settings, joins the group, and runs functions, each of
which must leave the state of the process as it was, for the next one.

Messages use multiprocessing connections. A request for a rank is followed by the descriptors of its
connection, of a pipe for its exit code (or minus the signal), and of stdout and stderr, on the same
socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from ..startup.initialize import prepare_local_rank
from .locate import Locator, loading

# A function, the modules of its arguments, these in pickled form, and filters of warnings.
Task = tuple[Locator, list[Locator], bytes, list[bytes]]
STATE_HOOK = "__rank_state__"
_VOLATILE = {"PYTEST_CURRENT_TEST"}


class _Server:
    """Sockets and children of the running server."""

    def __init__(self, control_fd: int) -> None:
        self.socket = socket.socket(fileno=control_fd)
        self.control: Connection[Any, Any] = Connection(os.dup(control_fd))
        self.exits: dict[int, Connection[Any, Any]] = {}  # pipes of the children that run, by pid
        signal.signal(signal.SIGCHLD, lambda *_: self.reap())

    def answer(self, request: dict[str, Any]) -> None:
        sys.path[:] = request["path"]  # the caller's path may have grown
        if "preload" not in request:
            _, fds, _, _ = socket.recv_fds(self.socket, 1, 4)
            self.control.send({"pid": self.fork(fds, request)})
            return
        try:
            _preload(request["preload"])
            self.control.send({})
        except Exception:
            self.control.send({"error": traceback.format_exc()})

    def fork(self, fds: list[int], request: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            self._become_rank(fds, request)
        self.exits[pid] = Connection(fds.pop(1), readable=False)
        for fd in fds:
            os.close(fd)
        self.reap()  # it may have ended before its pipe was known
        return pid

    def _become_rank(self, fds: list[int], request: dict[str, Any]) -> None:
        """Run the rank in the forked child; never returns to the server's loop."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            self.socket.close()
            os.close(fds.pop(1))
            for number, fd in enumerate(fds[1:], 1):
                os.dup2(fd, number)
                os.close(fd)
            main(fds[0], request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Send the caller the exit code of each child that has ended."""
        for pid in list(self.exits):
            with contextlib.suppress(ChildProcessError):  # a signal in this loop was quicker
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError), self.exits.pop(pid) as pipe:
                        pipe.send(os.waitstatus_to_exitcode(status))


def _preload(modules: Iterable[str]) -> None:
    """Import modules, then freeze the garbage collector so that forks keep sharing their memory."""
    missing = [module for module in modules if module not in sys.modules]
    for module in missing:
        importlib.import_module(module)
    if missing:
        gc.collect()
        gc.freeze()


def serve(control_fd: int, package: str) -> None:
    """Serve requests until the caller closes the socket; `package` is this module's."""
    server = _Server(control_fd)
    directory = tempfile.mkdtemp(prefix="scaletorch-ranks-")
    try:
        _preload([f"{package.rpartition('.')[0]}.public"])
        server.control.send({"directory": directory})
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                server.answer(server.control.recv())
    finally:
        for pid in list(server.exits):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


def main(connection_fd: int, request: dict[str, Any]) -> None:
    """Run one rank, as `RankPool` requests, until the caller closes the connection."""
    connection: Connection[Any, Any] = Connection(connection_fd)
    try:
        _adopt(request)
        _join_group(request)
        before = capture()
    except BaseException as error:
        connection.send_bytes(_pickle_failure(error))
        _leave(1)
    connection.send_bytes(pickle.dumps(("returned", pickle.dumps(None), [])))
    with contextlib.suppress(EOFError, ConnectionError):
        for run in itertools.count():
            task = connection.recv()
            if task is None:
                break
            separate_store(run)
            connection.send_bytes(_run(task, request["seed"], before))
    _leave(0)


def _leave(code: int) -> None:
    """Exit without interpreter shutdown, which sometimes deadlocks if process groups are alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _adopt(request: dict[str, Any]) -> None:
    """Apply the caller's environment, folder, module path and number of threads."""
    stacks = open(request["stack_file"], "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    faulthandler.enable(stacks)  # also records the stacks on a SIGSEGV and the like
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update({k: v for k, v in request["environment"].items() if v is not None})
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    torch.set_num_threads(request["threads"])
    random.seed()
    if request["world_size"] > (os.cpu_count() or 1) and sys.platform == "linux":
        # The kernel then does not preempt a rank's thread whenever another rank gets a message,
        # and gloo's collectives are about five times faster.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _join_group(request: dict[str, Any]) -> None:
    """Create the default group unless the function will."""
    backend, store, ranks = request["backend"], request["store"], request["world_size"]
    if backend != "gloo" and not (backend is None and store is None):
        warn = store is not None  # else `init_dist` warns
        backend = prepare_local_rank(backend, request["rank"], ranks, warn=warn)
    if store is None:
        return
    dist.init_process_group(
        backend,
        store=FileStore(store, ranks),
        rank=request["rank"],
        world_size=ranks,
        timeout=request["group_timeout"],
    )


def _run(task: Task, seed: int | None, before: dict[str, Any]) -> bytes:
    """Run one function; return the pickled answer: ("returned", result, state) or a failure."""
    locator, modules, arguments, filters = task
    if seed is not None:
        _seed(seed)
    try:
        fn = locator.find()
        with loading(locator):
            for module in modules:
                module.load()
            args, kwargs = ForkingPickler.loads(arguments)
        with filtered(filters):
            result = fn(*args, **kwargs)
            _finish_threads()
    except BaseException as error:
        return _pickle_failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    left = changes(before, capture())
    try:
        payload = pickle.dumps(result)
    except Exception as error:
        name = type(result).__name__
        error.add_note(f"{locator.qualname} returned a {name} that does not pickle")
        return _pickle_failure(error)
    return pickle.dumps(("returned", payload, left))


def _finish_threads() -> None:
    """Join the function's threads, but not workers of executors, which may never end."""
    executors = (("thread", "_threads_queues"), ("process", "_threads_wakeups"))
    for thread in threading.enumerate():
        endless = any(
            thread in getattr(sys.modules.get(f"concurrent.futures.{module}"), name, ())
            for module, name in executors
        )
        if not (thread.daemon or endless or thread is threading.current_thread()):
            thread.join()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _pickle_failure(error: BaseException) -> bytes:
    """Pickle ("failed", traceback text, exception), or None for an exception that cannot be."""
    text = "".join(traceback.format_exception(type(error), error, _below_here(error.__traceback__)))
    try:
        payload = pickle.dumps(error)
        ForkingPickler.loads(payload)  # some exceptions pickle but do not unpickle
    except Exception:
        payload = None
    return pickle.dumps(("failed", text, payload))


def _below_here(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without this file's frames at its top."""
    here = _run.__code__.co_filename
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename == here:
        rest = rest.tb_next
    return rest or trace


def environment() -> dict[str, str]:
    """Return the environment without the variables that test runners change for every test."""
    return {name: value for name, value in os.environ.items() if name not in _VOLATILE}


def _groups() -> object:
    if not dist.is_available() or not dist.is_initialized():
        return None
    world = dist.distributed_c10d._world
    return id(dist.group.WORLD), sorted(id(group) for group in world.pg_map)


def _declared() -> object:
    """Return the truthy results of `__rank_state__()`, which any module may define."""
    modules = {n: m for n, m in list(sys.modules.items()) if isinstance(m, type(sys))}
    hooks = {name: vars(module).get(STATE_HOOK) for name, module in modules.items()}
    states = {name: hook() for name, hook in hooks.items() if hook is not None}
    return {name: state for name, state in states.items() if state}


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses the old API after the new one was used
        return str(torch.backends.cuda.matmul.fp32_precision)


_PROBES: dict[str, Callable[[], object]] = {
    "process groups": _groups,
    "state that modules declare": _declared,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "number of threads": torch.get_num_threads,
    "float32 matmul precision": _matmul_precision,
    "environment": environment,
    "current folder": os.getcwd,
    "sys.path": lambda: list(sys.path),
    "Python threads": threading.active_count,
}


def capture() -> dict[str, object]:
    """Return the state of this process that could affect the next function."""
    return {name: probe() for name, probe in _PROBES.items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the states that changed."""
    return [name for name in before if before[name] != after[name]]


def separate_store(run: int) -> None:
    """Give the groups of this run their own key prefix in the default group's store.

    Torch names groups after their ranks. Without the prefix a run would find the addresses that a
    group of the same ranks left in an earlier run, and wait for them.
    """
    groups = dist.distributed_c10d._world.pg_map
    world = dist.group.WORLD
    if world is not None:
        backend, store = groups[world]
        if isinstance(store, PrefixStore):
            store = store.underlying_store
        groups[world] = backend, PrefixStore(f"run {run}", store)


def own_filters() -> list[bytes]:
    """Return this process's warning filters in order of precedence, each pickled if it can be."""
    found = []
    for each in warnings.filters:
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            found.append(pickle.dumps(each))
    return found


@contextlib.contextmanager
def filtered(filters: Iterable[bytes]) -> Iterator[None]:
    """Use these warning filters, and no others, inside the context."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for each in filters:
            with contextlib.suppress(ImportError, AttributeError):  # unknown category
                warnings.filters.append(pickle.loads(each))  # type: ignore[attr-defined]
        yield

"""Run functions on local ranks: `RankPool`, a reusable pool of processes, and `launch`."""

from __future__ import annotations

import functools
import io
import os
import pickle
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FunctionType
from typing import Any

from ..errors import InvalidArgumentError, StateError
from ..launchers import LOOPBACK
from ..startup.rendezvous import free_port
from .fork_server import own_filters
from .locate import locate, locate_name, rank_body
from .process import START_TIMEOUT, RankProcess, collect, get_server, stop

CLOSE_GRACE = 2.0  # seconds that ranks get to exit before they are killed
# Variables of an outer launch, which would mislead a rank of the pool.
_OUTER_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")


class RankPool:
    """Local ranks with a default process group that run one function after another.

    Args:
        world_size: Number of ranks.
        backend: Backend of the default group. With 'nccl', ranks share devices through sockets if
            there are too few, for tests. None takes the accelerator's backend if each rank can have
            a device, else gloo.
        timeout: Seconds that one `run` may take; None for no limit.
        group_timeout: Timeout of the group's collectives; None for torch's default.
        threads: Number of torch threads in each rank.
        init: False creates no group and sets the environment as torchrun would (`MASTER_ADDR`, a
            free `MASTER_PORT`), for functions that call `init_dist` themselves.
        env: Variables to set in each rank in addition to the caller's; a value of None removes one.
        seed: Seed for torch's, Python's and numpy's generators before every function; None for
            no seeding.

    Attributes:
        reusable: Whether the last function succeeded on all ranks and left no state behind.

    Raises:
        InvalidArgumentError: The world size is below 1.
        RankFailedError: A rank did not start.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "gloo",
        timeout: float | None = 60.0,
        group_timeout: timedelta | None = None,
        threads: int = 1,
        init: bool = True,
        env: Mapping[str, str | None] | None = None,
        seed: int | None = None,
    ) -> None:
        _check_world_size(world_size)
        self.world_size = world_size
        self.timeout = timeout
        self.reusable = False
        folder = tempfile.mkdtemp(dir=get_server().directory)
        self._processes: list[RankProcess] = []
        self._close = weakref.finalize(self, _close, os.getpid(), self._processes, folder)
        environment = _environment(world_size, init, env or {})
        try:
            for rank in range(world_size):
                request = {
                    "rank": rank,
                    "world_size": world_size,
                    "backend": backend,
                    "store": os.path.join(folder, "store") if init else None,
                    "group_timeout": group_timeout,
                    "threads": threads,
                    "folder": os.getcwd(),
                    "path": list(sys.path),
                    "seed": seed,
                    "environment": {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    "stack_file": os.path.join(folder, f"stack-{rank}"),
                }
                self._processes.append(get_server().spawn(request))
            collect(self._processes, "starting", START_TIMEOUT)
        except BaseException:
            self.kill()
            raise
        self.reusable = True

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank, with the caller's warning filters.

        Args:
            fn: A module-level function; ranks find it by its module's name or its file.
            args: Positional arguments for `fn`; must pickle.
            timeout: Seconds for this run, instead of the pool's timeout.
            kwargs: Keyword arguments for `fn`; must pickle.

        Returns:
            The return values, one per rank in order.

        Raises:
            InvalidArgumentError: Ranks could not find `fn`, or its arguments do not pickle.
            RankFailedError: A rank failed, died or did not finish; the pool is then closed.
            StateError: The pool is closed.
        """
        __tracebackhide__ = True  # for pytest: the ranks' tracebacks suffice
        if not self._close.alive:
            raise StateError("this pool of ranks is closed: create another RankPool")
        name, task = _pickle_task(fn, args, kwargs)
        self.reusable = False
        try:
            for process in self._processes:
                process.send(task)
            answers = collect(self._processes, name, self.timeout if timeout is None else timeout)
        except BaseException:
            self.kill()
            raise
        self.reusable = not any(left for _, left in answers)
        return [result for result, _ in answers]

    def kill(self) -> None:
        """Kill the ranks at once."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the ranks; kill those that do not exit in time. Safe to call twice."""
        self.reusable = False
        self._close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def launch(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
    group_timeout: timedelta | None = None,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `nproc` new ranks of this machine.

    Ranks share the cores, write to this process's stdout, use its warning filters, and have a
    default process group before `fn` starts. If a rank fails, all ranks end; Ctrl-C ends them too.

    Args:
        fn: A module-level function.
        nproc: Number of ranks.
        args: Positional arguments for `fn`; must pickle.
        backend: As for `RankPool`: None takes the accelerator's backend, or gloo.
        timeout: Seconds for the whole run; None for no limit.
        group_timeout: Timeout of the group's collectives; None for torch's default.
        init: False lets `fn` create the group, in the environment that torchrun would set.
        env: Variables to set in each rank; a value of None removes one.
        kwargs: Keyword arguments for `fn`; must pickle.

    Returns:
        The return values, one per rank in order.

    Raises:
        InvalidArgumentError: Ranks could not find `fn`, or its arguments do not pickle.
        RankFailedError: A rank failed, died or did not finish in time.

    Example:
        >>> def total(x):
        ...     data = torch.tensor(x * (dist.get_rank() + 1))
        ...     dist.all_reduce(data)
        ...     return data.item()
        >>> dist.launch(total, 2, 10)
        [30, 30]
    """
    _check_world_size(nproc)
    _pickle_task(fn, args, kwargs)  # raises before any process starts
    pool = RankPool(
        nproc,
        backend=backend,
        timeout=timeout,
        group_timeout=group_timeout,
        threads=max(1, (os.cpu_count() or 1) // nproc),
        init=init,
        env=env,
    )
    with pool:
        return pool.run(fn, *args, **kwargs)


def _check_world_size(world_size: int) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgumentError(
            f"the number of ranks must be an integer of at least 1, not {world_size!r}"
        )


def _environment(
    world_size: int, init: bool, changes: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Return the variables of all ranks: the caller's, a launcher's, and the requested changes."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_OUTER_LAUNCH)}
    launcher = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    if sys.platform in LOOPBACK:
        launcher["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    if not init:
        launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**inherited, "OMP_NUM_THREADS": "1", **launcher, **changes}


def _pickle_task(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, bytes]:
    """Return a function's name, and the pickled task with which a rank calls it."""
    __tracebackhide__ = True
    if isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    locator, buffer = locate(rank_body(fn)), io.BytesIO()
    pickler = _Arguments(buffer)
    try:  # separately, since a rank imports the modules before it loads them
        pickler.dump((args, kwargs))
    except Exception as error:
        raise InvalidArgumentError(
            f"the arguments of {locator.qualname} do not pickle, so they cannot be sent to "
            f"ranks: {error}"
        ) from error
    modules = [locate_name(module, name) for module, name in pickler.names.items()]
    task = locator, [each for each in modules if each.path], buffer.getvalue(), own_filters()
    return locator.qualname, pickle.dumps(task)


class _Arguments(pickle.Pickler):
    """A pickler that notes the modules of all functions and classes in arguments."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.names: dict[str, str] = {}  # module -> a name in it

    def reducer_override(self, value: Any) -> Any:
        """Note a module, and pickle as usual."""
        if isinstance(value, FunctionType | type):
            self.names[value.__module__] = value.__qualname__
        return NotImplemented


def _close(owner: int, processes: list[RankProcess], folder: str) -> None:
    if owner != os.getpid():  # a forked child of the owner exits: the ranks are not its own
        return
    for process in processes:
        process.send(pickle.dumps(None))
    stop(processes, CLOSE_GRACE)
    shutil.rmtree(folder, ignore_errors=True)

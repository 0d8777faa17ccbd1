"""Run a function, or the body of a test, on real ranks of this machine."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from .errors import RankFailedError
from .ranks.fork_server import environment
from .ranks.locate import BODY_ATTRIBUTE, PYTEST_REWRITING, importing
from .ranks.pool import RankPool
from .ranks.process import get_server
from .tensors import relative_error, worst

__all__ = ["distributed_test", "preload", "relative_error", "run_ranks", "worst"]

SEED = 0  # seed of every rank's generators at the start of each function
GROUP_TIMEOUT = timedelta(seconds=300)  # for test groups; a run's own timeout usually ends first
MAX_POOLS = 3  # idle pools kept for the next test
TEST_LIBRARIES = (PYTEST_REWRITING, "pytest", "hypothesis")  # test files import them, also on ranks

_pools: dict[str, RankPool] = {}  # least recently used first

Test = TypeVar("Test", bound=Callable[..., Any])


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` ranks that share a group.

    The next call reuses the ranks if the function succeeded and left no state behind (process
    groups, default dtype, environment …). Generators are seeded for every call. Ranks use the
    caller's warning filters, so pytest's `filterwarnings` applies on ranks too.

    Args:
        fn: A module-level function of a test file or of an importable module.
        world_size: Number of ranks.
        args: As for `launch`.
        timeout: Seconds; ranks that hang are killed and their stacks shown.
        init: False for ranks without a group, in the environment that torchrun would set.
        env: As for `launch`.
        backend: As for `RankPool`: with 'nccl', ranks share devices if there are too few.
        kwargs: As for `launch`.

    Returns:
        The return values, one per rank in order.

    Raises:
        InvalidArgumentError: As for `launch`.
        RankFailedError: A rank failed; the message has every traceback, the first failure first.
    """
    __tracebackhide__ = True  # for pytest: the ranks' tracebacks suffice
    if not init or env:
        with _new_pool(world_size, init=init, env=env, backend=backend) as fresh:
            return fresh.run(fn, *args, timeout=timeout, **kwargs)
    key = json.dumps([world_size, backend, os.getpid(), os.getcwd(), sys.path, environment()])
    pool = _pools.pop(key, None) or _new_pool(world_size, backend=backend)
    try:
        return pool.run(fn, *args, timeout=timeout, **kwargs)
    finally:
        if pool.reusable:
            _pools[key] = pool
            while len(_pools) > MAX_POOLS:
                _pools.pop(next(iter(_pools))).close()
        else:
            pool.close()


def _new_pool(world_size: int, **options: Any) -> RankPool:
    get_server().preload([name for name in TEST_LIBRARIES if name in sys.modules])
    return RankPool(world_size, group_timeout=GROUP_TIMEOUT, seed=SEED, **options)


def distributed_test(
    world_size: int = 2,
    timeout: float = 60.0,
    *,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    backend: str | None = "gloo",
) -> Callable[[Test], Test]:
    """Decorate a test so that its body runs on every rank.

    The test keeps its signature: fixtures and parameters are sent to the ranks, so they must
    pickle. The test is skipped if every rank skips. Args as in `run_ranks`.

    Example:
        >>> @distributed_test(world_size=4)
        ... def test_sum():
        ...     data = torch.ones(1)
        ...     torch.distributed.all_reduce(data)
        ...     assert data.item() == 4
    """

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True  # for pytest: the ranks' tracebacks suffice
            try:
                task = functools.partial(body, *args, **kwargs)
                run_ranks(task, world_size, timeout=timeout, init=init, env=env, backend=backend)
            except RankFailedError as error:
                _skip_if_all_skipped(error, world_size)
                raise

        setattr(test, BODY_ATTRIBUTE, body)
        return test  # type: ignore[return-value]

    return decorate


def _skip_if_all_skipped(error: RankFailedError, world_size: int) -> None:
    """Skip if every rank did; pytest's exception does not pickle, so read the text's last line."""
    ends = [text.rstrip().rpartition("\n")[2] for text in error.failures.values()]
    if len(ends) == world_size and all(end.startswith("Skipped") for end in ends):
        importlib.import_module("pytest").skip(ends[0].removeprefix("Skipped").lstrip(": "))


def preload(*modules: str) -> None:
    """Import modules once in the fork-server, so that ranks started later have them.

    Use it for modules that each rank of a test would import, such as `torch._dynamo`, which
    DistributedDataParallel needs (1.6 s per rank). A test file may call it at module level: in a
    rank that imports the file to find a function, the call does nothing.
    """
    if not importing():
        get_server().preload(modules)

"""State that ranks take over from their caller, or that a function must leave as it was."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

STATE_HOOK = "__rank_state__"
_VOLATILE = {"PYTEST_CURRENT_TEST"}


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
    for action, message, category, module, line in warnings.filters:
        words = (action, _pattern(message), category, _pattern(module), line)
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            found.append(pickle.dumps(words))
    return found


def _pattern(text: str | re.Pattern[str] | None) -> str:
    """Return a filter's text as a regular expression; Python's own filters have literal names."""
    if isinstance(text, str):
        return re.escape(text) + r"\Z"
    return "" if text is None else text.pattern


@contextlib.contextmanager
def filtered(filters: Iterable[bytes]) -> Iterator[None]:
    """Use these warning filters, and no others, inside the context."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for each in filters:
            with contextlib.suppress(ImportError, AttributeError):  # unknown category
                action, message, category, module, line = pickle.loads(each)
                warnings.filterwarnings(action, message, category, module, line, append=True)
        yield

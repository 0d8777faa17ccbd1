"""pytest's hooks and fixtures; the only file that imports pytest."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import pytest

from . import Ranks

MARKER = "ranks"
SIZE = "_ranks"  # parameter with a test's number of ranks, if the marker has several numbers
OPTIONS = ("timeout", "init", "env", "backend")
INNER = "hypothesis.inner_test"  # where hypothesis keeps the body of a test

# Fixtures that work only in this process, not on a rank.
ONLY_HERE = {
    "monkeypatch": "use `with pytest.MonkeyPatch.context() as monkeypatch:` in the test's body",
    "ranks": "use it in a test without the marker, with a function for the ranks",
    "assert_trains_alike": "it starts ranks itself: use it in a test without the marker",
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for `--markers` and `--strict-markers`."""
    text = "run the test's body on so many ranks of this machine, once for each number"
    options = "timeout=60, init=True, env=None, backend='gloo'"
    config.addinivalue_line("markers", f"{MARKER}(number, *numbers, {options}): {text}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks, `test_name[2ranks]`."""
    asked = _asked(metafunc.definition)
    if asked is not None and len(asked.args) > 1:
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, asked.args, ids=[f"{size}ranks" for size in asked.args])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a marked test that ranks cannot run, before its fixtures are set up."""
    asked = _asked(item)
    if asked is None:
        return
    from unittest import TestCase  # for marked tests only: it would delay the start of pytest

    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, TestCase):
        _refuse(item, "ranks can only run test functions and methods of plain classes")
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        _refuse(item, "it is async: call asyncio.run() in the body of a plain test")
    for name in inspect.signature(item.obj).parameters:
        if name in ONLY_HERE:
            _refuse(item, f"its fixture {name} acts in pytest's process alone: {ONLY_HERE[name]}")
    _size(item, asked)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run the body of a marked test on ranks, with this process's fixtures and parameters."""
    __tracebackhide__ = True
    asked = _asked(pyfuncitem)
    with contextlib.nullcontext() if asked is None else _on_ranks(pyfuncitem, asked):
        return (yield)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Run functions on ranks: `ranks.run(function, 4)` returns a list of their return values."""
    return Ranks()


@pytest.fixture(scope="session")
def assert_trains_alike() -> Callable[..., Any]:
    """Assert that a plain model trains on layouts as on one process; needs `scaletorch`."""
    umbrella = f"{__package__.rpartition('.')[0]}.verify"
    try:
        module = importlib.import_module(umbrella)
    except ModuleNotFoundError as error:
        if error.name != umbrella:
            raise
        words = "needs the package scaletorch, which is not installed: pip install scaletorch"
        raise pytest.fail.Exception(f"assert_trains_alike {words}", pytrace=False) from None
    found: Callable[..., Any] = module.assert_trains_alike
    return found


def _asked(node: pytest.Item) -> pytest.Mark | None:
    """Return a test's closest marker after a check of its arguments, or None if it has none."""
    mark = node.get_closest_marker(MARKER)
    if mark is None:
        return None
    if not mark.args or not all(type(size) is int and size > 0 for size in mark.args):
        said = ", ".join(map(repr, mark.args))
        _refuse(node, f"the marker needs numbers of ranks, such as ranks(2), and has ({said})")
    for name in mark.kwargs:
        if name not in OPTIONS:
            _refuse(node, f"the marker takes {', '.join(OPTIONS)}, and has {name}")
    return mark


def _size(item: pytest.Function, asked: pytest.Mark) -> int:
    """Return the number of ranks of a test."""
    callspec = getattr(item, "callspec", None)
    size = asked.args[0] if len(asked.args) == 1 else getattr(callspec, "params", {}).get(SIZE)
    if size is None:
        _refuse(item, "several numbers of ranks must stand above the test, its class or its file")
    return int(size)


@contextlib.contextmanager
def _on_ranks(item: pytest.Function, asked: pytest.Mark) -> Iterator[None]:
    """Replace a test's function, during this call, by one that runs its body on ranks."""
    from ..dist.testing import distributed_test

    decorate = distributed_test(_size(item, asked), **asked.kwargs)
    before = item.obj
    function = getattr(before, "__func__", before)
    hypothesis = getattr(function, "hypothesis", None)
    if hypothesis is not None:  # draws the examples in this process and sends each to the ranks
        inner = hypothesis.inner_test
        hypothesis.inner_test = decorate(_found_inside(inner))
        try:
            yield
        finally:
            hypothesis.inner_test = inner
        return
    bound = (before.__self__,) if inspect.ismethod(before) else ()
    item.obj = functools.partial(decorate(function), *bound)
    try:
        yield
    finally:
        item.obj = before


def _found_inside(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a hypothesis test under the name by which ranks find it."""

    @functools.wraps(inner)
    def body(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    body.__qualname__ = f"{inner.__qualname__}.{INNER}"
    return body


def _refuse(node: pytest.Item, why: str) -> NoReturn:
    pytest.fail(f"{node.nodeid} cannot run on ranks: {why}", pytrace=False)

"""Locate a function so that another process finds the same one."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..errors import InvalidArgumentError

MAIN_ALIAS = "__mp_main__"  # multiprocessing's own alias of `__main__`, known to both sides
PYTEST_REWRITING = "_pytest.assertion.rewrite"
BODY_ATTRIBUTE = "__rank_body__"  # attribute in which a decorator stores the function for ranks
_LOADED_BY_PATH = "loaded by path for a rank"

_loading: list[str] = []  # files that this process is importing to find a function


@dataclass(frozen=True, slots=True)
class Locator:
    """The location of a function: module name, file and qualified name."""

    module: str
    path: str | None  # the module's file; None for a built-in module
    qualname: str
    is_main: bool  # whether the module is the main program
    explains: bool  # whether pytest has rewritten the module's asserts; ranks then do too

    def find(self) -> Callable[..., Any]:
        """Return the function in the calling process."""
        target: Any = _find_module(self)
        for name in self.qualname.split("."):
            target = getattr(target, name)
        return rank_body(target)

    def load(self) -> None:
        """Load the module, from its file if its name cannot be imported, so that pickles find it.

        pytest names a test file by its folders, from which only `python -m pytest` imports.
        """
        if self.is_main or self.module not in sys.modules:
            _find_module(self)


def locate(fn: Callable[..., Any]) -> Locator:
    """Return the locator of a module-level function.

    Raises:
        InvalidArgumentError: Another process could not find this function.
    """
    if _loading:
        raise InvalidArgumentError(
            f"{_loading[-1]} starts ranks while a rank imports it to find a function: put that "
            'call below `if __name__ == "__main__":`'
        )
    module = getattr(fn, "__module__", None)
    qualname = getattr(fn, "__qualname__", None)
    owner = getattr(fn, "__self__", fn)  # a built-in function is bound to its module
    if module is None or qualname is None or not isinstance(owner, ModuleType | type(fn)):
        raise InvalidArgumentError(
            f"ranks can run a module-level function, not {fn!r}: write a function that creates "
            "the object on the rank"
        )
    if "<" in qualname:
        raise InvalidArgumentError(
            f"ranks cannot find {qualname!r} of {module}: lambdas and functions defined inside "
            "functions exist in this process alone; move it to module level"
        )
    return locate_name(module, qualname)


def locate_name(module: str, qualname: str) -> Locator:
    """Return the locator of a name in a loaded module.

    Raises:
        InvalidArgumentError: The module is the main program, which has no file.
    """
    is_main = module in ("__main__", MAIN_ALIAS)
    source = sys.modules.get("__main__" if is_main else module)
    spec = getattr(source, "__spec__", None)
    path = getattr(source, "__file__", None)
    if is_main and spec is not None:
        module = spec.name  # `python -m package.module`: importable under its real name
    elif is_main and (path is None or not os.path.isfile(path)):
        raise InvalidArgumentError(
            f"ranks cannot find {qualname!r}: it was typed into an interpreter, a notebook or "
            "standard input; put it in a file and import it"
        )
    explains = type(getattr(source, "__loader__", None)).__module__ == PYTEST_REWRITING
    return Locator(module, path and os.path.abspath(path), qualname, is_main, explains)


def rank_body(fn: Any) -> Callable[..., Any]:
    """Return the function that ranks run, inside any decorators."""
    candidate = fn
    while candidate is not None:
        body: Callable[..., Any] | None = getattr(candidate, BODY_ATTRIBUTE, None)
        if body is not None:
            return body
        hypothesis = getattr(candidate, "hypothesis", None)
        candidate = getattr(hypothesis, "inner_test", getattr(candidate, "__wrapped__", None))
    found: Callable[..., Any] = fn
    return found


def importing() -> bool:
    """Return whether this process is a rank that is importing a file to find a function."""
    return bool(_loading)


@contextmanager
def loading(locator: Locator) -> Iterator[None]:
    """Forbid starting ranks while files are imported to find a function or its arguments."""
    _loading.append(locator.path or locator.module)
    try:
        yield
    finally:
        _loading.pop()


def _find_module(locator: Locator) -> ModuleType:
    with loading(locator):
        module = _import(locator)
    if locator.is_main:
        sys.modules["__main__"] = sys.modules[MAIN_ALIAS] = module  # the names in pickles
    return module


def _import(locator: Locator) -> ModuleType:
    loaded = sys.modules.get("__main__" if locator.is_main else locator.module)
    if loaded is not None and locator.path is not None and _is_own(loaded, locator.path):
        return loaded
    by_path = locator.explains or not _is_importable(locator.module, locator.path)
    if locator.path is None or not by_path:
        return importlib.import_module(locator.module)
    name = MAIN_ALIAS if locator.is_main else locator.module
    mtime = os.stat(locator.path).st_mtime_ns
    return _load_file(name, locator.path, mtime, locator.explains)


def _is_own(module: ModuleType, path: str) -> bool:
    """Return whether this process loaded a file by itself, not by its path for a rank."""
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    by_path = spec is not None and spec.loader_state == _LOADED_BY_PATH
    return file is not None and os.path.abspath(file) == path and not by_path


def _is_importable(module: str, path: str | None) -> bool:
    """Return whether `import module` would import this file."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # such as a loaded module without a spec
        return False
    if spec is None or spec.origin is None or spec.loader_state == _LOADED_BY_PATH:
        return False
    return path is not None and os.path.isfile(spec.origin) and os.path.samefile(spec.origin, path)


@functools.lru_cache(maxsize=256)
def _load_file(name: str, path: str, mtime_ns: int, explains: bool) -> ModuleType:
    """Import a file as module `name`, once for each version of the file."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"{path} is not a Python file, so that ranks cannot load it")
    spec.loader_state = _LOADED_BY_PATH
    module = importlib.util.module_from_spec(spec)
    _add_parents(name)
    sys.modules[name] = module
    try:
        code = _explaining_code(path) if explains else None
        if code is None:
            spec.loader.exec_module(module)
        else:
            exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_parents(name: str) -> None:
    """Add modules for the folders in a module's name, since pickle imports the first of them."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        try:
            importlib.import_module(parent)
        except ModuleNotFoundError:
            _add_parents(parent)
            sys.modules[parent] = ModuleType(parent)


def _explaining_code(path: str) -> CodeType | None:
    """Compile a test file as pytest would, so that a failed assert shows its values."""
    try:
        pytest, file = importlib.import_module(PYTEST_REWRITING), Path(path)
        kept = pytest.get_cache_dir(file) / f"{file.stem}{pytest.PYC_TAIL}"
        code: CodeType | None = pytest._read_pyc(file, kept)
        if code is None:
            source, name = file.read_bytes(), str(file)
            tree = ast.parse(source, name)
            pytest.rewrite_asserts(tree, source, name)
            code = compile(tree, name, "exec", dont_inherit=True)
        return code
    except Exception:  # pytest's functions are private; without them asserts only show less
        return None

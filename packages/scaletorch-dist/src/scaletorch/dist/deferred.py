"""Names of a package that are imported one by one, when they are asked for.

Importing torch takes seconds, also for those who want a package's arithmetic alone. So a package
that has both has an `__init__.py` without imports of its own,

    if TYPE_CHECKING:
        from .public import *
    else:
        __getattr__, __dir__ = deferred(__name__)

and beside it `public.py`, which imports all of its names from the modules that have them.

No submodule may be called like a name: Python puts a submodule into its package, over the name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def deferred(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that has the names of its `public`.

    A name imports what it needs, and is then an attribute of the package like any other.
    Submodules are attributes too, as they are of a package that imports all of them.

    Args:
        package: The package, while it is imported.
    """
    home = sys.modules[package]
    table = cache(lambda: _origins(f"{package}.public"))

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(table())
        if name in table():
            module, original = table()[name]
            found = getattr(import_module(module, package), original)
            setattr(home, name, found)
            return found
        # Many look for `__wrapped__` and the like in all modules; a folder is called `__pycache__`.
        submodule = name.isidentifier() and not name.startswith("__")
        if submodule and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*vars(home), *table()})


def _origins(module: str) -> dict[str, tuple[str, str]]:
    """Return what a module imports from others, without importing it.

    Returns:
        Name → the other module, relative as it is written, and the name there.
    """
    loader: Any = find_spec(module).loader  # type: ignore[union-attr]
    text = loader.get_source(module)
    if text is None:  # of a program that was frozen there are compiled modules alone
        return {name: (module, name) for name in import_module(module).__all__}
    return {
        each.asname or each.name: ("." * line.level + (line.module or ""), each.name)
        for line in ast.parse(text).body
        if isinstance(line, ast.ImportFrom)
        for each in line.names
    }

"""Import a package's public names lazily, each on first access.

Importing torch takes seconds, which users of a package's pure arithmetic should not have to wait
for. So a package that has both has an `__init__.py` without imports of its own,

    from ._version import __version__ as __version__

    if TYPE_CHECKING:
        from .public import *
    else:
        __getattr__, __dir__ = deferred(__name__)

and a module `public.py`, which imports all public names from the modules that define them. The form
`from .wire import send as send` makes type checkers treat them as exported.

No submodule may share its name with a public name: importing the submodule would overwrite it.
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
    """Return `__getattr__` and `__dir__` for a package that exports the names of its `public`.

    The first access to a name imports its module; the name is then an ordinary attribute of the
    package. Submodules are attributes too, as in a package that imports all of them.

    Args:
        package: Name of the package, which is being imported.
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
        # Tools look up `__wrapped__` and the like; `__pycache__` is a folder, not a submodule.
        submodule = name.isidentifier() and not name.startswith("__")
        if submodule and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*vars(home), *table()})


def _origins(module: str) -> dict[str, tuple[str, str]]:
    """Map a module's imported names to (relative module, original name), without importing it."""
    loader: Any = find_spec(module).loader  # type: ignore[union-attr]
    text = loader.get_source(module)
    if text is None:  # a frozen program has only compiled modules
        names = vars(import_module(module))
        return {name: (module, name) for name in names if not name.startswith("_")}
    return {
        each.asname or each.name: ("." * line.level + (line.module or ""), each.name)
        for line in ast.parse(text).body
        if isinstance(line, ast.ImportFrom)
        for each in line.names
    }

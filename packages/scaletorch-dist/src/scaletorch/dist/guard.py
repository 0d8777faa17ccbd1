"""Alias of `scaletorch.guard`, which is a separate wheel."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..guard import *  # noqa: F403 - for type checkers

_HOME = f"{__spec__.name.rpartition('.dist.')[0]}.guard"

try:
    _guard = import_module(_HOME)
except ModuleNotFoundError as error:
    if error.name != _HOME:
        raise
    raise ModuleNotFoundError(
        "scaletorch.dist.guard needs a wheel of its own: pip install 'scaletorch-dist[guard]'",
        name=error.name,
    ) from None

sys.modules[__name__] = _guard

"""Numbers and texts that modules keep as plain attributes of Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_KINDS = (bool, int, float, complex, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module())) | {"_is_hf_initialized"}


def plain_attributes(named: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Return the plain attributes of modules by `module.attribute`, those of torch left out.

    Args:
        named: The modules with their names.
    """
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in named
        for name, value in vars(module).items()
        if name not in _OF_TORCH and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    return isinstance(value, _KINDS) or (isinstance(value, tuple) and all(map(_is_plain, value)))

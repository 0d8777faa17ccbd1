"""JSON files as dataclasses, each field checked by its type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..dist.errors import InvalidArgumentError


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        InvalidArgumentError: It cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} must be a JSON object")
    return content


def read_as(kind: Any, given: Any, where: str) -> Any:
    """Return JSON content as a value of a type.

    Args:
        kind: A dataclass, a tuple, a dict by names, a `Literal` or a plain type.
        given: The content.
        where: The place, for messages.

    Raises:
        InvalidArgumentError: A field is missing or unknown, or has another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, given, where)
    if origin is tuple and isinstance(given, list | tuple):
        each = inner[:1] * len(given) if inner[-1] is Ellipsis else inner
        if len(each) == len(given):
            pairs = enumerate(zip(each, given, strict=True))
            return tuple(read_as(own, value, f"{where} {at}") for at, (own, value) in pairs)
    elif origin is dict and isinstance(given, Mapping):
        return {name: read_as(inner[1], own, f"{where} {name}") for name, own in given.items()}
    elif origin is Literal:
        if given in inner:
            return given
    elif kind is float:
        if type(given) in (int, float) and math.isfinite(given):
            return given
    elif type(given) is kind:
        return given
    wanted = {int: "a whole number", float: "a finite number", str: "text"}.get(kind, kind)
    raise InvalidArgumentError(f"{where} must be {wanted}, got {given!r}")


def _dataclass(kind: Any, given: Any, where: str) -> Any:
    needed, known = _fields(kind)
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} must have the fields {', '.join(sorted(needed))}")
    if missing := sorted(needed - given.keys()):
        raise InvalidArgumentError(f"{where} misses {', '.join(missing)}")
    if unknown := sorted(given.keys() - known.keys()):
        names = ", ".join(sorted(known))
        raise InvalidArgumentError(f"{where} has unknown {', '.join(unknown)}; known are {names}")
    return kind(
        **{name: read_as(known[name], own, f"{where}: {name}") for name, own in given.items()}
    )


@cache
def _fields(kind: Any) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the fields that have no default, and the types of all."""
    needed = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    return frozenset(needed), get_type_hints(kind)

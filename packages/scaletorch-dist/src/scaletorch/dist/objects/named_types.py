"""Dataclasses and enums that a caller names, so that they are plain for this call."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

from ..errors import InvalidArgumentError
from .beside_pickle import Named, NotPlainError, Received, Sent, check


def named_types(types: Iterable[type]) -> Named:
    """Return dataclasses and enums by their names.

    Raises:
        InvalidArgumentError: One is neither, or cannot be made from its fields alone.
    """
    named = {}
    for kind in types:
        record = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if not (record or (isinstance(kind, type) and issubclass(kind, enum.Enum))):
            raise InvalidArgumentError(f"types takes dataclasses and enums, got {kind!r}")
        own_new: Any = kind.__new__
        if record and own_new is not object.__new__:
            message = f"types: a {kind.__qualname__} is made by more than its fields: leave it out"
            raise InvalidArgumentError(message)
        named[name_of(kind)] = kind
    return named


def name_of(kind: type) -> str:
    """Return the full name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def member_parts(data: enum.Enum, sent: Sent) -> tuple[str, str]:
    """Return the type and the name of a member."""
    if type(data).__members__.get(data.name) is not data:
        raise NotPlainError(f"{data!r}, which has no name of its own,")
    return name_of(type(data)), data.name


def record_parts(data: Any, sent: Sent) -> tuple[Any, ...]:
    """Return the type of a dataclass and the values of its fields."""
    kind, names = type(data), _fields(type(data))
    slots = {slot for each in kind.__mro__ for slot in vars(each).get("__slots__", ())}
    other = {*slots, *getattr(data, "__dict__", ())} - {*names, "__dict__", "__weakref__"}
    if other or not all(hasattr(data, name) for name in names):
        what = f"attributes that are no fields ({', '.join(sorted(other))})" if other else "gaps"
        raise NotPlainError(f"a {name_of(kind)} with {what}")
    return name_of(kind), tuple(getattr(data, name) for name in names)


def make_record(received: Received, kind: str, values: tuple[Any, ...]) -> Any:
    """Return an object of a dataclass; none of its code runs."""
    names = _fields(received.named[kind])
    check(len(values) == len(names), f"fields of a {kind}")
    made: Any = object.__new__(received.named[kind])
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]

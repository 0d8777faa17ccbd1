"""Putting a fault into the running library, and taking it out again."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ROOT = "scaletorch"
Mutate = Callable[[Any], Any]


@contextmanager
def patched(target: str, mutate: Mutate) -> Iterator[None]:
    """Replace a function (a property's getter) by what ``mutate`` makes of it.

    ``target`` is ``module:attribute`` or ``module:Class.attribute``, the module below the library's
    root. A function used elsewhere by ``from … import`` is named where it is used.
    """
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"{ROOT}.{module}")
    for each in owners:
        owner = getattr(owner, each)
    raw = vars(owner)[name]
    setattr(owner, name, _like(raw, mutate))
    try:
        yield
    finally:
        setattr(owner, name, raw)


def instead(fault: Callable[..., Any]) -> Mutate:
    """Return what makes of a function one that calls `fault`, with it before its arguments."""
    _, *given = inspect.signature(fault).parameters.values()

    def mutate(original: Any) -> Any:
        def faulty(*args: Any, **options: Any) -> Any:
            return fault(original, *args, **options)

        faulty.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        return faulty

    return mutate


def _like(raw: Any, mutate: Mutate) -> Any:
    if isinstance(raw, staticmethod):
        return staticmethod(mutate(raw.__func__))
    if isinstance(raw, property):
        return property(mutate(raw.fget))
    return mutate(raw)

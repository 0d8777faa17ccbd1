"""Code of users that runs between exchanges: its errors wait until the other ranks know of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Return what a call returns and no error, or None and the error that it raises."""
    try:
        return call(*args), None
    except Exception as error:  # of whatever kind: the others would wait for this rank
        return None, error

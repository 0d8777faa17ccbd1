"""Layouts, functions and values as command lines name them."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from typing import Any

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import layout_name, parse_layout

__all__ = ["layout_name", "load", "parse_layout", "read_argument"]


def load(name: str) -> Any:
    """Return what `package.module:name` names; the current folder counts.

    Raises:
        InvalidArgumentError: There is no such module, or no such name in it, or its own code fails.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"{name!r} is not package.module:name: {error}") from error
    except Exception as error:  # of the module's own code, or a relative name
        told = f"{type(error).__name__}: {error}"
        raise InvalidArgumentError(f"{name!r} cannot be imported: {told}") from error


def read_argument(text: str) -> tuple[str, Any]:
    """Read `name=value`, of which the value is a Python literal or else a word."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value

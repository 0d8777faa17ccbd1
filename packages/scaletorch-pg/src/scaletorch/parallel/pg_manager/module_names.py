"""Patterns of a plan, and the names of modules that they match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the dotted names that a pattern matches as a whole.

    `*` and `?` stand for any text and one character inside one component, a component `**` for
    any number of components, none included; "" is the root module.
    """
    wild = {"*": "[^.]*", "?": "[^.]"}
    compiled = re.compile(
        "".join(
            r"(?:[^.]+\.)*"
            if component == "**"
            else "".join(wild.get(c, re.escape(c)) for c in component) + r"\."
            for component in (pattern.split(".") if pattern else [])
        )
    )
    return [name for name in names if compiled.fullmatch(f"{name}." if name else "")]


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Return the words for a pattern that matches nothing, with the names that are nearest."""
    close = difflib.get_close_matches(pattern.replace("**.", ""), [n for n in names if n], n=3)
    hint = f"; nearest module names: {', '.join(close)}" if close else ""
    return f"pattern '{pattern}' of the plan matches no module{hint}"

"""Replacements of operators and constants, as data; each keeps the grouping of its expression."""

from __future__ import annotations

import ast

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}

# `|` is not mutated: it joins types and dicts, for which another operator is a TypeError.
ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/", "//")),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*", "%")),
    ast.Mod: ("%", ("//", "*")),
    ast.Pow: ("**", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
}

LOGIC: dict[type[ast.boolop], tuple[str, tuple[str, ...]]] = {
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
}


def other_constants(value: object) -> tuple[str, ...]:
    """Return replacements of a constant; none for strings, None and others."""
    if isinstance(value, bool):
        return (str(not value),)
    if isinstance(value, int):
        return (str(value + 1), f"({value - 1})" if value == 0 else str(value - 1))
    if isinstance(value, float):
        return (repr(value * 2), repr(value / 2)) if value else ("1.0",)
    return ()

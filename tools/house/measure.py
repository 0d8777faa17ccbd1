"""Lengths of files and functions, and those that are too long."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines, with docstrings and blanks


@dataclass(frozen=True, order=True)
class Length:
    """Lines of a file, or of a function in it."""

    lines: int
    name: str  # for a function with its line

    @property
    def place(self) -> str:
        """The file, and the function's name."""
        file, _, function = self.name.partition(":")
        return " ".join([file, *function.split()[1:]])


def sources(folder: Path) -> list[Path]:
    """Return the modules below a folder."""
    return sorted(folder.rglob("*.py"))


def file_lengths(paths: Iterable[Path], root: Path) -> Iterator[Length]:
    """Yield the lengths of files, named relative to a folder."""
    for path in paths:
        yield Length(len(path.read_text().splitlines()), str(path.relative_to(root)))


def function_lengths(paths: Iterable[Path], root: Path) -> Iterator[Length]:
    """Yield the lengths of functions, from `def` to the last line, without decorators."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield Length(lines, f"{path.relative_to(root)}:{node.lineno} {node.name}")


def too_long(folder: Path, root: Path) -> list[Length]:
    """Return the files and functions below a folder that are too long, longest first."""
    paths = sources(folder)
    files = [each for each in file_lengths(paths, root) if each.lines > LONGEST_FILE]
    functions = [each for each in function_lengths(paths, root) if each.lines > LONGEST_FUNCTION]
    return sorted([*files, *functions], reverse=True)

"""The record of lines that each test runs; every process of a test writes its lines.

`start` is for processes that share a folder: forks inherit it, new interpreters call it from
`sitecustomize.py` (see `tree.py`). Only lines of functions count, not those that run at import.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = "MUTATION_RECORD"  # environment variable: folder of the record; unset: no recording
TREE = "MUTATION_TREE"  # environment variable: the copy of the repository whose sources run
_FUNCTION = 0x1  # CO_OPTIMIZED: a function's code, not a module's or a class's
_RECORD = struct.Struct("<III")  # test, file, line
_NUMBER = struct.Struct("<I")


def set_test(folder: Path, number: int) -> None:
    """Set the number of the running test, for all processes."""
    with (folder / "test").open("r+b") as file:
        file.write(_NUMBER.pack(number))


def prepare(folder: Path, files: list[str]) -> None:
    """Create the folder; `files` are the paths to record, below the tree."""
    folder.mkdir(parents=True)
    (folder / "test").write_bytes(_NUMBER.pack(0))
    (folder / "lines").touch()
    (folder / "files").write_text("\n".join(files))


def start() -> None:
    """Record in this process and its forks, if the environment says so."""
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    with (folder / "test").open("rb") as file:
        current = mmap.mmap(file.fileno(), _NUMBER.size, access=mmap.ACCESS_READ)
    sink = os.open(folder / "lines", os.O_WRONLY | os.O_APPEND)
    tree = Path(os.environ[TREE])
    names = (folder / "files").read_text().splitlines()
    files = {str(tree / name): number for number, name in enumerate(names)}
    seen: dict[CodeType, tuple[bytes, set[int]]] = {}

    def begins(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in files or not code.co_flags & _FUNCTION:
            return None
        return runs(frame, event, argument)

    def runs(frame: FrameType, _: str, __: Any) -> Any:
        code, line, test = frame.f_code, frame.f_lineno, current[:]
        if code not in seen or seen[code][0] != test:
            seen[code] = (test, set())
        if line not in seen[code][1]:
            seen[code][1].add(line)
            number = _NUMBER.unpack(test)[0]
            os.write(sink, _RECORD.pack(number, files[code.co_filename], line))
        return runs

    threading.settrace(begins)
    sys.settrace(begins)


def read(folder: Path) -> dict[int, dict[str, set[int]]]:
    """Return test number → file → lines that the test ran."""
    names = (folder / "files").read_text().splitlines()
    found: dict[int, dict[str, set[int]]] = {}
    for test, file, line in _RECORD.iter_unpack((folder / "lines").read_bytes()):
        found.setdefault(test, {}).setdefault(names[file], set()).add(line)
    return found

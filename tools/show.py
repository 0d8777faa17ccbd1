"""Show what the project promises to who installs it and to who copies it, as one table.

``check_wheels.py`` checks each wheel alone, ``check_vendored.py`` copies in other projects. Words
are for the first: names of packages, and ``--tests``. 1 if anything is wrong.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import check_wheels
from rows import Row, table


def vendored() -> list[Row]:
    """Check vendored copies, where the program for it is there."""
    if find_spec("check_vendored") is None:
        return []
    rows: list[Row] = import_module("check_vendored").check()
    return [(f"vendored: {what}", found, ok) for what, found, ok in rows]


def main() -> int:
    """Print the table."""
    rows = [*check_wheels.check(*check_wheels.asked(sys.argv[1:])), *vendored()]
    print(table(rows), flush=True)
    return int(not all(ok for *_, ok in rows))


if __name__ == "__main__":
    sys.exit(main())

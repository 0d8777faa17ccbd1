"""Show what the project promises to who installs it and to who copies it, as one table.

``check_wheels.py`` checks each wheel alone, ``check_vendored.py`` copies in other projects. Words
are for the first: names of packages, and ``--tests``. 1 if anything is wrong.
"""

from __future__ import annotations

import sys

import check_vendored
import check_wheels
from rows import table


def main() -> int:
    """Print the table."""
    rows = check_wheels.check(*check_wheels.asked(sys.argv[1:]))
    rows += [(f"vendored: {what}", found, ok) for what, found, ok in check_vendored.check()]
    print(table(rows), flush=True)
    return int(not all(ok for *_, ok in rows))


if __name__ == "__main__":
    sys.exit(main())

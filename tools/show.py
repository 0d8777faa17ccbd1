"""Show what the project promises to who installs it and to who copies it, as one table.

``wheels`` checks each wheel alone, ``vendoring`` copies in other projects. Words
are for the first: names of packages, and ``--tests``. 1 if anything is wrong.
"""

from __future__ import annotations

import sys

from .rows import table
from .vendoring import check as check_vendored
from .wheels import check as check_wheels


def main() -> int:
    """Print the table."""
    rows = check_wheels.check(*check_wheels.asked(sys.argv[1:]))
    rows += [(f"vendored: {what}", found, ok) for what, found, ok in check_vendored.check()]
    print(table(rows), flush=True)
    return int(not all(ok for *_, ok in rows))


if __name__ == "__main__":
    sys.exit(main())

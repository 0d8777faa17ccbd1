"""How far is `scaletorch.plan` off published runs, in time and memory?

Nothing runs: layouts, models and measurements are data (`scaletorch.plan.known`), models are
described by closed forms, and three constants of each machine were fitted on other runs than those
that are shown. `--fitted` shows these too; `--fit` fits the constants again, in half a minute.

    python -m benchmarks.published_plans
"""

from __future__ import annotations

import argparse

from scaletorch.plan.known.machines import GIB, MACHINES
from scaletorch.plan.known.predicted import fitted
from scaletorch.plan.known.rows import SOURCES, rows
from scaletorch.plan.known.tables import HEAD, RULE, compared, constants, lines, summary


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fitted", action="store_true", help="show the runs that were fitted on")
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    given = parser.parse_args()
    found = compared(rows())
    if given.fit:
        for machine in sorted({each.row.machine for each in found if each.row.fit}):
            own, again = MACHINES[machine].constants, fitted(machine, rows())
            print(
                f"{machine}: products {again.products:.2f}, {again.overhead * 1e6:.0f} µs, "
                f"{again.reserved / GIB:.1f} GiB{'' if own == again else ' - CHANGED'}"
            )
        return
    print(*constants(), sep="\n")
    tables = {
        name: [each for each in found if each.row.table == name and each.row.fit == given.fitted]
        for name in SOURCES
    }
    for name, shown in tables.items():
        if shown:
            print(f"\n{name}: {SOURCES[name]}\n", HEAD, RULE, *lines(shown), sep="\n")
    print(
        "\nErrors\n", *summary({name: shown for name, shown in tables.items() if shown}), sep="\n"
    )


if __name__ == "__main__":
    main()

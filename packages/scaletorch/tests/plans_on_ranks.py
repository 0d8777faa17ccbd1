"""``hatch run plans``: is what a plan says of random layouts what their ranks hold?"""

from __future__ import annotations

import argparse
from itertools import islice

from planned import (
    differences,
    drawn_gathering,
    drawn_shared,
    drawn_wide,
    gathering,
    higher,
    peaks,
)

from scaletorch.dist import launch

SHARES = {2: 0.3, 4: 0.5, 8: 0.2}  # of the layouts, by ranks
KINDS = {  # what is held at most in a step
    "peak": (drawn_wide, peaks),
    "peak with zero": (drawn_shared, peaks),
    "peak with zero 3": (drawn_gathering, gathering),
}


def main() -> int:
    """Run the command; 1 if a rank holds something else."""
    parser = argparse.ArgumentParser("hatch run plans", description=__doc__)
    parser.add_argument("--layouts", type=int, default=200, help="how many of each kind (200)")
    parser.add_argument("--kind", choices=KINDS, help="one alone")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    given = parser.parse_args()
    wrong = total = 0
    for kind in (given.kind,) if given.kind else KINDS:
        draw, measure = KINDS[kind]
        for ranks, share in SHARES.items():
            cases = list(islice(draw(given.seed, ranks), round(given.layouts * share)))
            found = launch(measure, ranks, cases)
            for index, case in enumerate(cases):
                own = [each[index] for each in found]
                other = [*differences(case, own), *higher(case, own)]
                wrong += bool(other)
                print(*(other or [f"{kind} as planned: {case}"]), sep="\n", flush=True)
            total += len(cases)
    print(f"{total - wrong} of {total} layouts are as planned")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())

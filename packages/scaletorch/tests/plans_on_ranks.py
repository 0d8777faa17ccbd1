"""``hatch run plans``: is what a plan says of random layouts what their ranks hold?"""

from __future__ import annotations

import argparse
from itertools import islice

from planned import differences, drawn, higher, peaks

from scaletorch.dist import launch

SHARES = {2: 0.3, 4: 0.5, 8: 0.2}  # of the layouts, by ranks


def main() -> int:
    """Run the command; 1 if a rank holds something else."""
    parser = argparse.ArgumentParser("hatch run plans", description=__doc__)
    parser.add_argument("--layouts", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    given = parser.parse_args()
    wrong = total = 0
    for ranks, share in SHARES.items():
        cases = list(islice(drawn(given.seed, ranks), round(given.layouts * share)))
        for case, *own in zip(cases, *launch(peaks, ranks, cases), strict=True):
            other = [*differences(case, own), *higher(case, own)]
            wrong += bool(other)
            print(*(other or [f"as planned: {case}"]), sep="\n", flush=True)
        total += len(cases)
    print(f"{total - wrong} of {total} layouts are as planned")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())

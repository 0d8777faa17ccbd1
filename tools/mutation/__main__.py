"""Change one random place of the sources at a time, and find the test that notices.

python -m tools.mutation hunt FOLDER --seed 1 --count 400    resumes if it was ended before
python -m tools.mutation show FOLDER                         the figure, and the survivors
python -m tools.mutation again FOLDER 17 --tests FILE::TEST  run today's tests against survivors
python -m tools.mutation planted FOLDER [--names NAME ...]   faults of known kinds, by their tests
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ..packages import ROOT
from . import planted
from .again import again
from .hunt import Hunt, go, read, resolve
from .show import show


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["hunt", "show", "again", "planted"])
    parser.add_argument("folder", type=Path, help="where results are kept")
    parser.add_argument("numbers", type=int, nargs="*", help="of mutants (again)")
    parser.add_argument("--commit", default="HEAD", help="whose sources are changed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nice", type=int, default=5)
    parser.add_argument("--tests", nargs="+", default=[], help="FILE or FILE::TEST (again)")
    parser.add_argument("--names", nargs="+", default=[], help="of planted faults; all by default")
    given = parser.parse_args()
    commit = resolve(ROOT, given.commit)
    out = given.folder.resolve()
    hunt = Hunt(ROOT, out, commit, given.seed, given.count, given.workers, given.nice)
    if given.what == "hunt":
        go(hunt, lambda text: print(text, flush=True))
    elif given.what == "again":
        again(hunt, given.numbers, given.tests, lambda text: print(text, flush=True))
    elif given.what == "planted":
        os.environ.setdefault("SCALETORCH_SWEEPS", "all")  # a fault's test may be another day's
        sys.exit(0 if planted.hunt(hunt, given.names, lambda text: print(text, flush=True)) else 1)
    else:
        known = json.loads((out / "hunt.json").read_text())
        print(show(read(hunt), **known))


if __name__ == "__main__":
    main()

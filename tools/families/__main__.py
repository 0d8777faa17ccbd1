"""Try every causal family of the installed transformers on every axis and pair of axes.

python -m tools.families                        all; writes docs/families.json and the pages
python -m tools.families bert gpt2 --axes tp,cp only these
python -m tools.families --quarter 3            one quarter of the families, in turn
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import transformers

from . import page, record
from .axes import AXES
from .names import names
from .run import cells
from .verdicts import FAULTS


def main() -> int:
    """Run the command line; return 1 if a cell is an obscure error, differs or hangs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="NAME")
    parser.add_argument("--axes", type=lambda text: text.split(","), default=[*AXES])
    parser.add_argument("--quarter", type=int, choices=range(4))
    parser.add_argument("--json", type=Path, default=record.FILE, help="where verdicts are kept")
    given = parser.parse_args()
    chosen = given.families or names()
    if given.quarter is not None:
        chosen = chosen[given.quarter :: 4]
    began, faults, count = time.monotonic(), 0, 0
    for name, axis, verdict in cells(chosen, given.axes):
        error = "" if verdict.error is None else f"{verdict.error:.0e}"
        print(f"{name:24} {axis:6} {verdict.word:17} {error:7} {verdict.words}", flush=True)
        record.keep(given.json, transformers.__version__, name, axis, verdict)
        faults += verdict.word in FAULTS
        count += 1
    if given.json == record.FILE:
        page.write(*record.read())
    print(f"{count} cells in {time.monotonic() - began:.0f} s, {faults} of them faults")
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())

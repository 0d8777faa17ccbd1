"""Train every causal family under transformers' own tensor parallelism, and compare.

python -m tools.families.own_tp               all, and writes docs/families_own_tp.json
                                              and the pages
python -m tools.families.own_tp apertus llama these alone
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..names import names
from . import page
from .record import FILE, keep, read
from .run import families
from .verdicts import WRONG, Family


def main() -> int:
    """Run what the command line says; 1 if a family is reported otherwise than it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, default=FILE, help="where verdicts are kept")
    given = parser.parse_args()
    began, mistakes, count = time.monotonic(), 0, 0
    for name, found in families(given.families or names()):
        keep(given.json, name, found)
        print(f"{name:24} {_line(found)}", flush=True)
        mistakes += found.false_alarm or found.missed
        count += 1
    if given.json == FILE:
        page.write(read())
    print(f"{count} families in {time.monotonic() - began:.0f} s, {mistakes} of them misjudged")
    return int(mistakes > 0)


def _line(found: Family) -> str:
    if found.word:
        return f"{found.word}: {found.words}"
    said = (
        f"{dtype} {each.word}{': ' + each.words if each.word == WRONG else ''}"
        for dtype, each in found.by_dtype.items()
    )
    return f"{found.error:.0e}, {', '.join(said)}"


if __name__ == "__main__":
    raise SystemExit(main())

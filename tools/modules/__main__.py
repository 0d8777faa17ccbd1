"""Random token models on random layouts, compared with one float64 process.

python -m tools.modules --seeds 0-99           three layouts for the module of each seed
python -m tools.modules --seeds 0- --minutes 5 as many seeds as the time allows
python -m tools.modules --seeds 7 --layouts tp2 "pp2 tp2 zb_v sequence_parallel mb4"
python -m tools.modules --seeds 7 --layouts tp2 --recipe mlp=topk plan=no_head
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ..families.verdicts import HANGS, Verdict
from . import layouts, recipe
from .run import LIMIT, Runner, Setting, layouts_of
from .verdicts import FAULTS, FOUND, REFUSED, UNSEEN, reason


def settings(given: argparse.Namespace) -> Iterator[Setting]:
    """Yield the settings that the command line selects."""
    first, ranged, last = given.seeds.partition("-")
    seeds: Iterable[int] = range(int(first), int(last or first) + 1)
    if ranged and not last:
        seeds = itertools.count(int(first))
    for seed in seeds:
        own = recipe.draw(seed) if given.recipe is None else recipe.parsed(given.recipe)
        for layout in map(layouts.parsed, given.layouts or ()):
            yield Setting(own, seed, layout)
        for layout in () if given.layouts else layouts_of(seed, given.each):
            yield Setting(own, seed, layout)


def table(verdicts: list[tuple[Setting, Verdict]]) -> str:
    """Return the number of settings by verdict and axes, and the reasons of refusals."""
    words = sorted({verdict.word for _, verdict in verdicts})
    counts = Counter((" ".join(s.layout.axes), verdict.word) for s, verdict in verdicts)
    lines = [f"{'':8}" + "".join(f"{word:>24}" for word in words)]
    for axes in sorted({axes for axes, _ in counts}):
        lines.append(f"{axes:8}" + "".join(f"{counts[axes, word]:24}" for word in words))
    totals = Counter(verdict.word for _, verdict in verdicts)
    lines.append(f"{'all':8}" + "".join(f"{totals[word]:24}" for word in words))
    reasons = Counter(reason(v.words) for _, v in verdicts if v.word in (REFUSED, FOUND, UNSEEN))
    return "\n".join([*lines, "", *(f"{n:6} {why}" for why, n in reasons.most_common())])


def main() -> int:
    """Run the command line; return 1 if a setting is a fault."""
    parser = argparse.ArgumentParser(
        "hatch run modules", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0-99", help="7, 0-99, or 0- with --minutes")
    parser.add_argument("--layouts", nargs="+", help="instead of drawn ones")
    parser.add_argument("--each", type=int, default=3, help="layouts that are drawn for a seed")
    parser.add_argument("--recipe", nargs="+", help="parts of the module, instead of drawn ones")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--timeout", type=float, default=LIMIT, help="seconds for a setting")
    parser.add_argument("--shrink", action="store_true", help="find what a fault needs")
    given = parser.parse_args()
    found: list[tuple[Setting, Verdict]] = []
    needed = Counter[str]()
    runner, began = Runner(given.timeout), time.monotonic()
    with contextlib.closing(runner.pools):
        for setting in settings(given):
            if time.monotonic() - began > 60 * given.minutes:
                break
            verdict = runner.run(setting)
            found.append((setting, verdict))
            error = "" if verdict.error is None else f"{verdict.error:.0e}"
            print(f"{verdict.word:22} {error:6} {setting}\n    {verdict.words[:300]}", flush=True)
            if verdict.word in FAULTS:
                print(f"    {setting.again(drawn=given.recipe is None)}", flush=True)
                if given.shrink and verdict.word != HANGS:  # shrinking would take minutes
                    less = runner.shrink(setting, verdict)
                    needed[f"{verdict.word}: {recipe.shown(less.recipe)}"] += 1
                    print(f"    {less.again(drawn=False)}", flush=True)
    faults = sum(verdict.word in FAULTS for _, verdict in found)
    print(f"\n{table(found)}\n")
    print("\n".join(f"{n:6} {what}" for what, n in needed.most_common()))
    print(f"{len(found)} settings in {time.monotonic() - began:.0f} s, {faults} of them faults")
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""``hatch run mutants``: does the proof find every fault that is put in?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mutants import MUTANTS, Outcome, hunt, to_markdown
from mutants.locating import is_located, locate_all, place_of, with_places
from mutants.mutant import Mutant

from scaletorch.bisect import Report


def main() -> int:
    """Run the command; 1 if a fault survives."""
    parser = argparse.ArgumentParser("hatch run mutants", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="which; all by default")
    parser.add_argument("--out", type=Path, help="file for the table in Markdown")
    parser.add_argument("--locate", action="store_true", help="say where each fault is born, too")
    arguments = parser.parse_args()
    chosen = [MUTANTS[n] for n in arguments.names] or None

    def show(outcome: Outcome) -> None:
        verdict = "caught" if outcome.caught else "SURVIVES"
        print(f"{verdict:9}{outcome.mutant.name:36}{outcome.mutant.case!s:32}{outcome}")

    outcomes = hunt(chosen, progress=show)
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults caught")
    table = to_markdown(outcomes)
    if arguments.locate:
        reports = locate_all(chosen, progress=tell)
        right = sum(is_located(MUTANTS[name], report) for name, report in reports.items())
        print(f"{right} of {len(reports)} faults located")
        table = with_places(table, reports)
    if arguments.out is not None:
        arguments.out.write_text(table)
    return 0 if caught == len(outcomes) else 1


def tell(mutant: Mutant, report: Report) -> None:
    """Print where a fault was located, and where it is if that is elsewhere."""
    right = is_located(mutant, report)
    print(f"{'located' if right else 'NOT':9}{mutant.name:36}{place_of(report)}", flush=True)
    if not right:
        print(f"{'':9}{'':36}it is born in {mutant.born}")


if __name__ == "__main__":
    sys.exit(main())

"""``hatch run mutants``: does the proof find every fault that is put in?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mutants import MUTANTS, Outcome, hunt, to_markdown


def main() -> int:
    """Run the command; 1 if a fault survives."""
    parser = argparse.ArgumentParser("hatch run mutants", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="which; all by default")
    parser.add_argument("--out", type=Path, help="file for the table in Markdown")
    arguments = parser.parse_args()

    def show(outcome: Outcome) -> None:
        verdict = "caught" if outcome.caught else "SURVIVES"
        print(f"{verdict:9}{outcome.mutant.name:36}{outcome.mutant.case!s:32}{outcome}")

    outcomes = hunt([MUTANTS[n] for n in arguments.names] or None, progress=show)
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults caught")
    if arguments.out is not None:
        arguments.out.write_text(to_markdown(outcomes))
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Check the types of changed files and run a few fast tests of each package, in minutes.

`hatch run quick [BASE]` does both after the lint: mypy on the files that differ from `BASE` (see
`changed.py`), and `TESTS` in the running environment: the main purpose of each package, on ranks.
`hatch run check` tests everything, each package with only the wheels that it needs.
"""

from __future__ import annotations

import subprocess
import sys

from ..packages import ROOT, folder
from . import changed

# Whole files, since starting pytest and the ranks' server takes the most time.
TESTS = {
    "scaletorch-dist": ["test_p2p.py", "test_checks.py", "test_collectives.py"],
    "scaletorch-guard": ["test_guard_diagnosis.py"],
    "scaletorch-pg": ["test_pg_axis.py", "test_grid.py", "test_loss.py"],
    "scaletorch-tp": ["test_tp_comms.py", "test_tp_layers.py", "test_tp_partial.py"],
    "scaletorch-cp": ["test_cp_layouts.py", "test_cp_comms.py", "test_cp_ring.py"],
    "scaletorch-pp": ["test_pp_schedules.py", "test_pp_ties.py"],
    "scaletorch-dp": ["test_dp_buckets.py", "test_dp_hooks.py"],
    "scaletorch-ep": ["test_ep_refusals.py", "test_ep_dispatch.py"],
    "scaletorch": [
        "test_first_step.py",
        "test_checkpoint.py",
        "test_plan_search.py",
        "test_verify_asserting.py",
        "test_bisect_patterns.py",
    ],
    changed.CROSSING: ["test_house.py", "test_links.py", "test_translations.py", "test_changed.py"],
}


def typed(files: list[str] | None) -> list[str]:
    """Return the files that mypy checks; an empty list means all files of the configuration."""
    if files is None:
        return []
    checked = ("packages/scaletorch/tests/mutants/", "tools/", "benchmarks/", "examples/")
    return [
        file
        for file in files
        if file.endswith(".py")
        and (ROOT / file).is_file()
        and ("/src/" in file or file.startswith(checked))
    ]


def tests() -> list[str]:
    """Return the paths of the tests."""
    found = []
    for suite, files in TESTS.items():
        place = ROOT if suite == changed.CROSSING else folder(suite)
        found += [str((place / "tests" / file).relative_to(ROOT)) for file in files]
    return found


def main(arguments: list[str]) -> int:
    """Run both, or only the tests with `--tests`; return 1 if anything failed."""
    commands = [["pytest", "-q", *tests()]]
    base = arguments[0] if arguments else None
    files = [] if base == "--tests" else changed.changed_files(base)
    if files is None or typed(files):
        commands.insert(0, ["mypy", *typed(files)])
    codes = [subprocess.call([sys.executable, "-m", *words], cwd=ROOT) for words in commands]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

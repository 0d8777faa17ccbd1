"""Lines of a package that its own tests run, including ranks and other processes.

A suite runs under coverage.py. It starts in every Python process of the tests, follows forks, and
saves when a rank leaves by `os._exit` and after each function that ran on it. Killed processes lose
what they did since the last save.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..packages import ROOT, portions

BOUND = 90.0  # least % of lines that each package's own tests run
CONFIGURATION = f"--rcfile={ROOT / 'pyproject.toml'}"
START = "import lines_start"  # a line of a .pth file, which every Python of the environment runs
START_MODULE = Path(__file__).with_name("lines_start.py")


@dataclass(frozen=True, slots=True)
class Covered:
    """Lines of one package."""

    package: str
    lines: int
    covered: int
    missing: dict[str, list[int]]  # file → lines

    @property
    def percent(self) -> float:
        """Percentage of covered lines."""
        return 100 * self.covered / self.lines


def measuring(package: str, site: Path) -> list[str]:
    """Return Python arguments that measure the package installed in folder `site`."""
    sources = ",".join(str(site / portion) for portion in portions(package))
    return ["-m", "coverage", "run", CONFIGURATION, _data(site), f"--source={sources}"]


def _data(site: Path) -> str:
    """Return the option for the files that processes write; each adds a suffix to the name."""
    return f"--data-file={site / 'measured' / 'lines'}"


def collect(package: str, site: Path) -> Covered:
    """Combine the measurements of all processes of the package's suite, run from `site`."""
    tool = [sys.executable, "-m", "coverage"]
    file = _data(site)
    report = site / "measured.json"
    subprocess.run([*tool, "combine", "-q", CONFIGURATION, file], cwd=ROOT, check=True)
    subprocess.run([*tool, "json", "-q", CONFIGURATION, file, "-o", report], cwd=ROOT, check=True)
    found = json.loads(report.read_text())
    missing = {
        str(Path(name).relative_to(site)): entry["missing_lines"]
        for name, entry in found["files"].items()
    }
    totals = found["totals"]
    return Covered(package, totals["num_statements"], totals["covered_lines"], missing)


def table(results: list[Covered]) -> str:
    """Return a table of packages, with missing lines of a single one or one below the bound."""
    rows = [f"\n{'package':<16}{'lines':>8}{'covered':>9}{'%':>8}"]
    for one in results:
        below = f"  below {BOUND:g}" if one.percent < BOUND else ""
        rows.append(f"{one.package:<16}{one.lines:>8}{one.covered:>9}{one.percent:>8.1f}{below}")
    rows += [missing(one) for one in results if one.percent < BOUND or len(results) == 1]
    return "\n".join(rows)


def missing(one: Covered) -> str:
    """Return a line for each file with lines that no test ran."""
    rows = [f"\nlines of {one.package} that its tests do not run:"]
    rows += [f"  {file}: {ranges(lines)}" for file, lines in one.missing.items() if lines]
    return "\n".join(rows)


def ranges(lines: list[int]) -> str:
    """Return numbers as text such as `3-5, 9`."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and runs[-1][-1] == line - 1:
            runs[-1][1:] = [line]
        else:
            runs.append([line])
    return ", ".join("-".join(map(str, run)) for run in runs)

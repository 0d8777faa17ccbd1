"""Refusal of wheels from two series: by pip, or by the import if pip lets one in."""

from __future__ import annotations

import re
from pathlib import Path

from ..building import build, of_version
from ..environments import pip, run
from ..packages import modules, requirements, version
from ..rows import CheckError
from .alone import Alone
from .metadata import next_series


def build_next(packages: list[str], into: Path) -> None:
    """Build the wheel of each package in its next series."""
    for package in packages:
        build(of_version(package, next_series(package), into / "sources"), into)


def refuses(alone: Alone, newer: Path) -> str:
    """Ask pip for an installed package with a sibling's next series; then upgrade only the sibling.

    pip refuses the first. It does the second and only prints a line, so the import has to refuse.
    """
    sibling = requirements(alone.package)[-1]
    new = f"{sibling}=={next_series(sibling)}"
    source = ["install", "--no-index", "-f", str(alone.wheels), "-f", str(newer)]
    asked = pip(
        alone.python, *source, "--dry-run", f"{alone.package}=={version(alone.package)}", new
    )
    if asked.returncode == 0 or "conflict" not in asked.stderr:
        raise CheckError(f"pip would install it beside {new}:\n{asked.stdout}{asked.stderr}")
    pip(alone.python, *source, new)
    program = ("-c", f"import {modules(alone.package)[-1]}")
    done = run(alone.python, *program, folder=newer)
    message = done.stderr.rstrip().split("\n")[-1]
    if done.returncode == 0 or "VersionMismatchError" not in message or sibling not in message:
        raise CheckError(f"it can be imported beside {new}:\n{done.stderr}")
    way_out = re.search("`pip (install [^`]*)`", message)
    pip(alone.python, *source, *way_out[1].split()[1:] if way_out else ())
    if run(alone.python, *program, folder=newer).returncode:
        raise CheckError(f"what the error advises does not help:\n{message}")
    return f"pip refuses it beside {new}; so does its import, and says how to mend it"

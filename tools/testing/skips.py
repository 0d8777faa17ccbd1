"""Reasons of skipped tests, and whether they are allowed.

A test that skips because a launcher or a compiler is missing looks like one that passed. A machine
that should have them says so: `SCALETORCH_TESTS_HAVE="slurm mpi compiler"` (`.ci/run` installs them
and sets it). There a suite fails if a test skipped because one of these is missing, or for a reason
that is not in `REASONS`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

VARIABLE = "SCALETORCH_TESTS_HAVE"
# The missing thing by the reason of a skip; the first match counts.
REASONS = {
    r"needs a CUDA device|no CUDA device|does not fit this device": "cuda",
    r"GiB of free memory": "memory",
    r"this environment has no (usable mpi4py|mpirun)": "an MPI of its own",
    r"hatch env create (openmpi|mpich)|no usable mpi4py|no mpirun|only one MPI": "mpi",
    r"hatch env create ray": "ray",
    r"hatch env create deepspeed": "deepspeed",
    r"hatch env create oldest": "oldest",
    r"no network namespaces|not installed: ip$": "namespaces",
    r"scontrol|not installed: .*(slurm|munge|srun|sbatch)": "slurm",
    r"only root can start it": "root",
    r"cannot be built|needs a compiler": "compiler",
    r"could not import": "libraries",
    r"tested alone|needs the tests of|in the repository alone": "repository",
    r"torch has MPI|has an accelerator|[Oo]nly Linux|Linux's": "another machine",
    r"^as planned$": "nothing: the skip itself is tested",
}
NAMES = frozenset(REASONS.values())


def lacking(reason: str) -> str:
    """Return the thing that is missing for this reason; the reason itself if it is unknown."""
    return next((need for form, need in REASONS.items() if re.search(form, reason)), reason)


def skipped(report: Path) -> Counter[str]:
    """Return the reasons in pytest's JUnit report, with the number of tests for each."""
    root = ElementTree.parse(report).getroot()
    return Counter(each.get("message", "") for each in root.iter("skipped"))


def forbidden(reasons: Counter[str], has: str | None) -> list[str]:
    """Return a line for each reason for which no test may skip on this machine.

    Args:
        reasons: Reasons with the number of tests for each.
        has: Words of `SCALETORCH_TESTS_HAVE`; None if it is not set, so that every test may skip.

    Raises:
        ValueError: A word is not in `NAMES`.
    """
    if has is None:
        return []
    if unknown := {*has.split()} - NAMES:
        raise ValueError(f"{VARIABLE}: {sorted(unknown)} are none of {sorted(NAMES)}")
    wrong = {*has.split()} | {reason for reason in reasons if lacking(reason) == reason}
    return [f"{n} skipped: {reason}" for reason, n in reasons.items() if lacking(reason) in wrong]

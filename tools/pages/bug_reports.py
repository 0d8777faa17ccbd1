"""Run the programs of examples/bugs, and update their reports in docs/bugs_found.md.

python -m tools.pages.bug_reports
"""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

from scaletorch.bisect import Report, compare
from scaletorch.dist.ranks import RankPool
from scaletorch.dist.testing import preload

from ..groups import own_groups
from ..packages import ROOT

PAGES = (ROOT / "docs" / "bugs_found.md", ROOT / "docs" / "zh" / "bugs_found.md")
PROGRAMS = {path.stem: path for path in sorted((ROOT / "examples" / "bugs").glob("*.py"))}
_IMPORTED = (
    "scaletorch.bisect", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "transformers.models.apertus.modeling_apertus",
    "transformers.models.hrm_text.modeling_hrm_text",
)  # fmt: skip
_SHOWN = re.compile(
    r"(^```console\npython examples/bugs/(\w+)\.py one\n.*?^```\n+```text\n)(.*?)(?=^```)",
    re.S | re.M,
)


class Found(NamedTuple):
    """The reports of a program, as it is and mended."""

    wrong: Report
    mended: Report


def run_program(name: str, *arguments: str) -> None:
    """Run a program in this process, or on a rank of a pool, which already has its group."""
    given = mock.patch.object(sys, "argv", [name, *arguments])
    group = mock.patch.object(dist, "init_process_group")
    with given, group, own_groups(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(PROGRAMS[name]), run_name="__main__")


def reports(folder: Path) -> dict[str, Found]:
    """Run all programs, each in its own folder below this one; return their reports."""
    preload(*_IMPORTED)
    found = {}
    with RankPool(2) as pool:
        for name in PROGRAMS:
            own = folder / name
            own.mkdir()
            run_program(name, str(own / "one"))
            pool.run(run_program, name, str(own / "two"))
            pool.run(run_program, name, str(own / "mended"), "--mended")
            with contextlib.chdir(own):  # so that reports show relative folders
                found[name] = Found(compare("one", "two"), compare("one", "mended"))
    return found


def shown(text: str) -> dict[str, str]:
    """Return the reports on a page, by program."""
    return {program: report for _, program, report in _SHOWN.findall(text)}


def rounded(report: str) -> str:
    """Return a report without the correct tensor that is farthest off and its distance.

    That is rounding, which differs between machines.
    """
    return re.sub(r"(?<=; the largest error is) .*", "", report)


def main() -> None:
    """Write the pages."""
    with tempfile.TemporaryDirectory() as folder:
        found = reports(Path(folder))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(
            _SHOWN.sub(lambda match: f"{match[1]}{found[match[2]].wrong}\n", text), encoding="utf-8"
        )


if __name__ == "__main__":
    main()

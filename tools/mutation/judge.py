"""Run chosen tests in this process, in order, until one fails, and record the result of each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from . import recorder


class Reporter:
    """Selects and orders tests, limits their time, and writes a line when each begins and ends."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.limits: dict[str, float] | None = request.get("tests")  # test → seconds; None for all
        self.only: list[str] = request.get("only", [""])  # beginnings of names, if `tests` is None
        self.record = Path(request["record"]) if "record" in request else None
        self.file = open(request["report"], "a", buffering=1)  # noqa: SIM115 - till the end
        self.numbers: dict[str, int] = {}
        self.spent: dict[str, float] = {}

    def write(self, **event: Any) -> None:
        """Write one event."""
        self.file.write(json.dumps(event) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the requested tests, in their order."""
        if self.limits is None:
            items[:] = [item for item in items if self.wanted(item)]
            self.numbers = {item.nodeid: n for n, item in enumerate(items, 1)}
            return
        there = {item.nodeid: item for item in items}
        items[:] = [there[name] for name in self.limits if name in there]
        for item in items:
            item.add_marker(pytest.mark.timeout(self.limits[item.nodeid]), append=False)

    def wanted(self, item: pytest.Item) -> bool:
        """Return whether a test runs when no test is named."""
        marked = any(item.get_closest_marker(name) for name in ("gpu", "slow"))
        return not marked and item.nodeid.startswith(tuple(self.only))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins."""
        if self.record:
            recorder.set_test(self.record, self.numbers[nodeid])
        self.write(began=nodeid, number=self.numbers.get(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the end of a phase of a test."""
        self.spent[report.nodeid] = self.spent.get(report.nodeid, 0) + report.duration
        if report.failed:
            text = report.longreprtext
            late = "Timeout (>" in text or "Timeout >" in text
            self.write(failed=report.nodeid, late=late, text=text[-600:])
        elif report.skipped:
            self.write(skipped=report.nodeid, text=str(report.longrepr)[-600:])
        elif report.when == "teardown":
            self.write(ended=report.nodeid, seconds=self.spent[report.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that does not load."""
        if report.failed:
            self.write(
                failed=report.nodeid or "collection", late=False, text=str(report.longrepr)[-600:]
            )


def run(request: dict[str, Any]) -> int:
    """Run the request's tests; return pytest's exit status."""
    began = time.monotonic()
    settings = __import__("hypothesis").settings
    settings.register_profile("mutation", derandomize=True, database=None)
    settings.load_profile("mutation")
    tree = request["tree"]
    words = [
        "-c",
        f"{tree}/pyproject.toml",
        f"--rootdir={tree}",
        f"--basetemp={tree}/.mutation/pytest",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries are already imported
    words += ["--tb=short"] if request.get("tests") is None else ["-x", "--tb=line"]
    reporter = Reporter(request)
    status = int(pytest.main([*words, *request["files"]], plugins=[reporter]))
    reporter.write(status=status, seconds=time.monotonic() - began)
    return status

"""The caller's side of a nursery: a copy of the sources, and the process that runs its tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import scope, tree

NURSERY = "mutation.nursery"


class Worker:
    """A copy of the repository and a warm process that runs its tests."""

    def __init__(self, folder: Path, niceness: int) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *("nice", "-n", str(niceness), sys.executable, "-P", "-m", NURSERY),
                *(str(folder), *scope.PRELOAD),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=tree.environment(folder),
            start_new_session=True,
        )
        self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, files: list[str], limit: float, **more: Any) -> tuple[list[dict[str, Any]], bool]:
        """Run tests; return the recorded events, and whether the processes ended by themselves."""
        shutil.rmtree(tree.temporary(self.folder), ignore_errors=True)
        tree.temporary(self.folder).mkdir()
        report = self.folder / ".mutation" / "report"
        report.write_text("")
        own = {"tree": str(self.folder), "report": str(report), "log": str(report) + ".log"}
        request = {**own, "files": files, "limit": limit, **more}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ended = self._line()["ended"]
        return [json.loads(line) for line in report.read_text().splitlines()], ended

    def close(self) -> None:
        """End the process and its children."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

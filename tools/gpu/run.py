"""Groups as processes, each with its own log, time limit and CUDA MPS daemon."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scaletorch.dist.testing import worst

from ..packages import ROOT
from . import checks, ranks
from .checks import FAILED, HUNG, PASSED, SKIPPED, Row
from .groups import Group

MPS = "nvidia-cuda-mps-control"
STACKS_AFTER = 2.0  # s for a hung process to write its stacks
_TAIL = 6000  # characters of a log to keep


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a group."""

    name: str
    word: str
    seconds: float
    rows: list[Row]
    note: str = ""
    log: str = ""

    @property
    def error(self) -> float | None:
        """The largest error of its checks."""
        errors = [row.error for row in self.rows if row.error is not None]
        return worst(errors) if errors else None

    def cells(self) -> tuple[str, ...]:
        """Return a row of the table."""
        fine = sum(row.word == PASSED for row in self.rows)
        error = "" if self.error is None else f"{self.error:.1e}"
        odd = [row for row in self.rows if row.word in (FAILED, HUNG)]
        odd += [row for row in self.rows if row.word == SKIPPED]
        note = self.note or "; ".join(f"{row.name}: {row.note}" for row in odd[:2])
        count = f"{fine}/{len(self.rows)}"
        return self.name, self.word, f"{self.seconds:.0f}", count, error, note[:100]

    def plain(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**asdict(self), "worst_error": self.error}


class Running:
    """A group's process, which loads its libraries and waits for its turn."""

    def __init__(self, group: Group, folder: Path, given: Mapping[str, Any]) -> None:
        self.group = group
        self._folder = folder / re.sub(r"\W+", "-", group.name)
        self._folder.mkdir()
        self._out, self._log = self._folder / "rows", self._folder / "log"
        self._env = dict(os.environ)
        if given["device"] == "cuda":
            pipe, log = str(self._folder / "pipe"), str(self._folder / "mps")
            self._env |= {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}
        self._shares = group.shares and given["device"] == "cuda" and ranks.is_shared()
        command = [sys.executable, "-m", "tools.gpu.worker", group.name, str(self._out)]
        with self._log.open("w") as log_file:
            self._process = subprocess.Popen(
                [*command, json.dumps(given)], stdin=subprocess.PIPE, stdout=log_file,
                stderr=subprocess.STDOUT, env=self._env, cwd=ROOT, text=True,
                start_new_session=True,
            )  # fmt: skip

    def finish(self, seconds: float) -> Outcome:
        """Let it run for at most `seconds`; return the outcome."""
        start, late = time.monotonic(), False
        with self._daemon():
            try:
                self._process.communicate(f"{seconds - 5}\n", timeout=seconds)
            except subprocess.TimeoutExpired:
                late = True
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(STACKS_AFTER)
            finally:
                self.end()
        return self._outcome(time.monotonic() - start, late)

    def end(self) -> None:
        """Kill the process and its children; ranks end with their parent process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _outcome(self, seconds: float, late: bool) -> Outcome:
        rows = checks.rows(self._out)
        words = {row.word for row in rows}
        word = next((each for each in (FAILED, HUNG, PASSED) if each in words), SKIPPED)
        note, log = "", self._log.read_text(errors="replace")[-_TAIL:]
        if late:
            word, note = HUNG, f"ended after {seconds:.0f} s"
        elif self._process.returncode or not rows:
            word, note = FAILED, f"ended with code {self._process.returncode}"
        return Outcome(self.group.name, word, seconds, rows, note, "" if word == PASSED else log)

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[None]:
        """Run an MPS daemon for the group's ranks, if this machine has one."""
        control = shutil.which(MPS) if self._shares else None
        if control is None:
            yield
            return
        for name in ("pipe", "mps"):
            (self._folder / name).mkdir()
        quiet: dict[str, Any] = {"env": self._env, "stdout": subprocess.DEVNULL, "timeout": 20}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control, "-d"], check=False, **quiet)
        try:
            yield
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit -t 3\n", text=True, check=False, **quiet)

"""Results of a group's checks, written as one line of JSON as soon as each check ends."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scaletorch.dist.errors import RankFailedError

PASSED, FAILED, HUNG, SKIPPED = "passed", "failed", "hung", "skipped"
SLACK = {"cuda": 1, "cpu": 10}  # time limits are for a GPU
_LOST = ("CUDA error", "illegal memory access", "device-side assert")  # the device is lost


class Skip(Exception):
    """A check that cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a check.

    Attributes:
        error: Largest relative error, if numbers were compared.
        bound: Largest allowed error.
        note: Further remark.
        figures: Measured figures by name.
    """

    error: float | None = None
    bound: float = math.inf
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A check as it is written down; `text` has tracebacks and stacks of hung ranks."""

    name: str
    word: str
    seconds: float
    error: float | None = None
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    text: str = ""


class Checks:
    """Runs the checks of a group and writes down their results.

    Attributes:
        device: 'cuda' or 'cpu'.
        quick: Whether to run few and small checks.
        slack: Factor of all time limits.
    """

    def __init__(self, out: Path, device: str, quick: bool, seconds: float) -> None:
        self.device, self.quick = device, quick
        self.slack = SLACK[device]
        self._out, self._end = out, time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds left for this group."""
        return self._end - time.monotonic()

    def run(self, name: str, check: Callable[..., Found], *args: Any) -> None:
        """Run one check and write down what it raises; re-raise if the device is lost."""
        start = time.monotonic()
        try:
            if self.left() <= 0:
                raise Skip("the group's time is over")
            self._add(name, check(*args), time.monotonic() - start)
        except Skip as why:
            self._write(Row(name, SKIPPED, 0.0, note=str(why)))
        except Exception as error:
            late = isinstance(error, RankFailedError) and not error.failures
            note, text = brief(error), traceback.format_exc()
            word = HUNG if late or isinstance(error, TimeoutError) else FAILED
            self._write(Row(name, word, time.monotonic() - start, note=note, text=text))
            if any(words in text for words in _LOST) and not isinstance(error, RankFailedError):
                raise

    def _add(self, name: str, found: Found, seconds: float) -> None:
        """Write down a check's result; a NaN error exceeds every bound."""
        fine = found.error is None or found.error <= found.bound
        note = found.note if fine else f"bound {found.bound:.1e} {found.note}"
        word = PASSED if fine else FAILED
        self._write(Row(name, word, seconds, found.error, note, found.figures))

    def _write(self, row: Row) -> None:
        with self._out.open("a") as file:
            print(json.dumps(asdict(row)), file=file)


def brief(error: BaseException) -> str:
    """Return an error's class and its most informative line: of ranks, the last of the first."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    if isinstance(error, RankFailedError) and error.failures:
        lines = [next(iter(error.failures.values())).rstrip().splitlines()[-1]]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def rows(out: Path) -> list[Row]:
    """Return the rows that a group has written so far."""
    lines = out.read_text().splitlines() if out.exists() else []
    return [Row(**json.loads(line)) for line in lines]

"""Progress bar and JSON log of rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

LOG = "log.jsonl"


class Reporter:
    """Writes one JSON line a step and moves a progress bar; does nothing if `folder` is None."""

    def __init__(self, folder: Path | None, title: str, start: int, steps: int) -> None:
        self.folder, self.title, self.start, self.steps = folder, title, start, steps
        self.log: TextIO | None = None
        self.progress: Any = None
        self.last = time.perf_counter()

    def __enter__(self) -> Reporter:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / LOG
            cut_log(path, self.start)
            self.log = path.open("a")
            self.progress = progress_bar()
            self.progress.start()
            self.task = self.progress.add_task(
                self.title, total=self.steps, completed=self.start, numbers=""
            )
        self.last = time.perf_counter()
        return self

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.progress is not None:
            self.progress.console.print(text, highlight=False, soft_wrap=True)

    def step(self, step: int, values: Mapping[str, float], *, tokens: int) -> None:
        """Report a 1-based step; `tokens` are those of the global batch."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if self.log is None:
            return
        speed = tokens / seconds
        row = {"step": step, **values, "seconds": seconds, "tokens_per_s": speed}
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        numbers = f"loss {values['loss']:.4f}  {speed:,.0f} tokens/s"
        self.progress.update(self.task, advance=1, numbers=numbers)

    def __exit__(self, *_: object) -> None:
        if self.log is not None:
            self.log.close()
            self.progress.stop()


def cut_log(path: Path, steps: int) -> None:
    """Drop the rows after `steps` steps, and an incomplete line that a killed run left."""
    path.touch()
    with path.open("rb+") as log:
        end = 0
        for line in log:
            if not line.endswith(b"\n") or json.loads(line)["step"] > steps:
                break
            end += len(line)
        log.truncate(end)


def progress_bar() -> Any:
    """Return a rich progress bar; without a terminal it prints only its last state."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(  # fits 80 columns
        TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(compact=True),
    )  # fmt: skip

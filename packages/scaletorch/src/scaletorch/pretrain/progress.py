"""JSON log and printed lines of rank 0."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

LOG = "log.jsonl"


class Reporter:
    """Logs and prints one line a step; does nothing if `folder` is None."""

    def __init__(self, folder: Path | None, start: int, steps: int) -> None:
        self.folder, self.start, self.steps = folder, start, steps
        self.log: TextIO | None = None

    def __enter__(self) -> Reporter:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / LOG
            cut_log(path, self.start)
            self.log = path.open("a")
        self.last = time.perf_counter()
        return self

    def say(self, text: str) -> None:
        """Print a line."""
        if self.log is not None:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

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
        self.say(f"step {step}/{self.steps}  loss {values['loss']:.4f}  {speed:,.0f} tokens/s")

    def __exit__(self, *_: object) -> None:
        if self.log is not None:
            self.log.close()


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

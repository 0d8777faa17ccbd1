"""What rank 0 shows and keeps: progress bar, JSON lines, loss curve."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO


class Reporter:
    """Writes one JSON line a step and moves a progress bar; does nothing where ``folder`` is None.

    Args:
        folder: where the log goes; None on all ranks but 0.
        title: shown beside the bar.
        start: steps done before this run (of a resumed one).
        steps: the last step's number.
    """

    def __init__(self, folder: Path | None, title: str, start: int, steps: int) -> None:
        self.folder, self.title, self.start, self.steps = folder, title, start, steps
        self.log: TextIO | None = None
        self.progress: Any = None
        self.last = time.perf_counter()

    def __enter__(self) -> Reporter:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "log.jsonl"
            cut_log(path, self.start)
            self.log = path.open("a")
            self.progress = progress_bar()
            self.progress.start()
            self.task = self.progress.add_task(
                self.title, total=self.steps, completed=self.start, numbers=""
            )
        self.last = time.perf_counter()
        return self

    def step(
        self, step: int, values: Mapping[str, float], *, tokens: int, flops: float, peak: float
    ) -> None:
        """Report one step.

        Args:
            step: 1-based number.
            values: loss, gradient norm, learning rate.
            tokens: tokens of the global batch.
            flops: model FLOPs of the global batch.
            peak: FLOP/s that the job could reach.
        """
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if self.log is None:
            return
        row = {"step": step, **values, "seconds": seconds, "tokens_per_s": tokens / seconds,
               "mfu": flops / seconds / peak}  # fmt: skip
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        numbers = (
            f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  MFU {row['mfu']:.1%}"
        )
        self.progress.update(self.task, advance=1, numbers=numbers)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.log is not None:
            self.log.close()
            self.progress.stop()


def cut_log(path: Path, steps: int) -> None:
    """Drop the rows after so many steps, and one that a killed run left without an end."""
    path.touch()
    with path.open("rb+") as log:
        end = 0
        for line in log:
            if not line.endswith(b"\n") or json.loads(line)["step"] > steps:
                break
            end += len(line)
        log.truncate(end)


def progress_bar() -> Any:
    """Return a rich progress bar; on something that is no terminal it prints its last state."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(),
    )  # fmt: skip


def save_curve(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw loss curves, name → loss of each step, into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for style, (name, losses) in zip("-:", curves.items(), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name, linewidth=2)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120)

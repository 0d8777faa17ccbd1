"""Progress bar and JSON log of rank 0, and model FLOPs utilisation (MFU)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from ..models import LlamaConfig, MixtureConfig

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

    def step(
        self, step: int, values: Mapping[str, float], *, tokens: int, flops: float, peak: float
    ) -> None:
        """Report a 1-based step; `tokens` and `flops` are of the global batch."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if self.log is None:
            return
        row = {"step": step, **values, "seconds": seconds, "tokens_per_s": tokens / seconds,
               "mfu": flops / seconds / peak}  # fmt: skip
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        numbers = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  {row['mfu']:.1%}"
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


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Return forward + backward FLOPs of one token: 6 per weight used, plus causal attention.

    Source: PaLM, https://arxiv.org/abs/2204.02311, appendix B, halved for the causal mask.
    """
    head_dim = config.hidden_size // config.num_heads
    attention = config.hidden_size * head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    if isinstance(config, MixtureConfig):  # the token's top_k experts, and the router
        mlp = config.top_k * mlp + config.num_experts * config.hidden_size
    weights = config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size
    return 6.0 * weights + 6.0 * config.num_layers * config.hidden_size * seq_len


def job_peak(device: torch.device, dtype: torch.dtype, world_size: int) -> float:
    """Return the peak FLOP/s of `world_size` ranks, by the best of several square products."""
    ranks = world_size if device.type != "cpu" else min(world_size, os.cpu_count() or 1)
    size = 512 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)  # not random: resuming is bitwise
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        (a @ a).sum().item()  # .item() waits for the device
        best = min(best, time.perf_counter() - start)
    return ranks * 2.0 * size**3 / best

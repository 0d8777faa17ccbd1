"""Time to save and load a checkpoint, compared with the disk and with torch's own ways.

The state is a Llama's and AdamW's after one step: three float32 numbers a parameter. Each repeat
saves and loads by every way, shuffled, in the same processes and in new folders, which are removed
afterwards; all saved files are fsynced. Before each way a file of the same size is written and
removed unsynced, since a virtual machine's first use of a page is slow. Files go to the temporary
folder: set TMPDIR.

    python -m benchmarks.checkpoint --out checkpoint.md
    TMPDIR=/mnt/disk python -m benchmarks.checkpoint --quick

- raw: each rank writes as many bytes as ours to one file, by os.write of one buffer and fsync, or
  reads as many as its tensors have into existing memory. "raw and crc32" adds the checksums that
  ours saves and compares.
- torch.save: by rank 0, and by the other ranks for their own shards; torch.load maps the files.
- DCP: torch.distributed.checkpoint with its FileSystemWriter and FileSystemReader, in place.

The slower rank counts. Ratios are medians of each repeat's own ratio. MiB/s of a save count all
files, of a load all ranks' tensors. Loads read recently written files from memory, not from the
disk. torch.load and DCP compare no checksums.

Behind steps: a save in the background, and steps until it is done on all ranks. Stall: time of the
call that starts it; the first one allocates buffers. Step ratio: mean step during the save / median
of the steps just before all saves. Lost: the stall plus the extra time of all those steps. Until
wait: time from the call until it is known to be finished, checked at the end of a step.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist

from scaletorch.dist import RankPool
from scaletorch.dist.testing import preload
from scaletorch.models import LlamaConfig

from ..harness.tables import MIB, largest, machine, parser, publish, ratios, table
from ..harness.turns import in_turns
from .ways import ASYNCHRONOUS, OURS, RAW, SYNCHRONOUS, Job, Layout, Pending

SMALL = LlamaConfig(2048, 512, 1408, 6, 8, 8)
LARGE = LlamaConfig(2048, 1024, 2560, 8, 16, 16)
USUAL = 2  # steps before each save that measure the usual step time
SAVE, LOAD = 0, 1
FIRST = "first"  # name of the folder of the first save


@dataclass(frozen=True)
class Repeats:
    """Number of plain saves and loads, and of saves in the background."""

    saves: int
    behind: int


@dataclass
class Behind:
    """Seconds of one background save: stall, until wait, steps before it, steps during it."""

    stall: float
    total: float
    before: list[float]
    steps: list[float]


@dataclass
class Figures:
    """Measurements of one rank.

    Attributes:
        times: Seconds of a save and a load, by way and repeat.
        files: Bytes of all files of one checkpoint, by way.
        held: Bytes of this rank's tensors.
        behind: Background saves, by way and repeat.
    """

    held: int
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    behind: dict[str, list[Behind]] = field(default_factory=dict)


def measure(size: LlamaConfig, layout: Layout, root: Path, repeats: Repeats) -> Figures:
    """Measure on one rank; all ranks call it in the same way."""
    warnings.simplefilter("ignore")  # DCP's deprecations
    job = Job(size, layout)
    found = Figures(job.held)
    with_folder(job, root / FIRST, partial(first, job))
    for name in in_turns(SYNCHRONOUS, repeats.saves):
        with_folder(job, root / name, partial(both, job, name, found))
    for name in in_turns(ASYNCHRONOUS, repeats.behind):
        with_folder(job, root / name, partial(behind, job, name, found))
    return found


def with_folder(job: Job, folder: Path, task: Callable[[Path], None]) -> None:
    """Run a task on all ranks with a new shared folder."""
    if job.rank == 0:
        folder.mkdir()
    gc.collect()
    dist.barrier()
    path = folder / f"{job.rank}.warm"  # else a way would pay for pages that the last one freed
    path.write_bytes(job.memory)
    path.unlink()
    dist.barrier()
    task(folder)
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(folder)
    dist.barrier()


def first(job: Job, folder: Path) -> None:
    """Save by ours once, to load modules and open connections; note the bytes that it writes."""
    SYNCHRONOUS[OURS][SAVE](job, folder)
    path = folder / "step-00000001" / f"rank-{job.rank:05d}.safetensors"
    job.written = path.stat().st_size if path.exists() else 0


def both(job: Job, name: str, found: Figures, folder: Path) -> None:
    """Save and load; the first time, check that the same tensors come back."""
    acts, check = SYNCHRONOUS[name], name not in found.times and not name.startswith(RAW)
    saved = timed(lambda: acts[SAVE](job, folder))
    dist.barrier()
    found.files[name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    before = {}
    if check:
        before = {key: each.clone() for key, each in job.tensors().items()}
        for each in job.tensors().values():
            each.fill_(7)
        dist.barrier()
    loaded = timed(lambda: acts[LOAD](job, folder))
    found.times.setdefault(name, []).append((saved, loaded))
    for key, each in job.tensors().items() if check else ():
        if not torch.equal(each, before[key]):
            raise RuntimeError(f"{name} loaded another {key} than was saved")


def timed(task: Callable[[], object]) -> float:
    """Return the seconds that a task takes."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def behind(job: Job, name: str, found: Figures, folder: Path) -> None:
    """Save in the background, and train until all ranks are done."""
    before = [timed(job.step) for _ in range(USUAL)]
    dist.barrier()
    start = time.perf_counter()
    done, wait = ASYNCHRONOUS[name](job, folder)
    stall, steps = time.perf_counter() - start, []
    while busy((done, wait)):
        steps.append(timed(job.step))
    wait()
    total = time.perf_counter() - start
    found.behind.setdefault(name, []).append(Behind(stall, total, before, steps))


def busy(pending: Pending) -> bool:
    """Return whether any rank still writes."""
    running = torch.tensor(float(not pending[0]()))
    dist.all_reduce(running)
    return bool(running)


Ranks = Sequence[Figures]


def seconds(ranks: Ranks, name: str, act: int) -> list[float]:
    """Return the time of each repeat, on the slower rank."""
    return largest([rank.times[name] for rank in ranks], itemgetter(act))


def against_raw(ranks: Ranks, name: str, act: int) -> str:
    """Return the median ratio to the raw way."""
    found = ratios(seconds(ranks, name, act), seconds(ranks, RAW, act))
    return f"{statistics.median(found):.2f}"


def synchronous_rows(ranks: Ranks) -> Iterator[Sequence[str]]:
    """Yield a row for each way."""
    for name in SYNCHRONOUS:
        cells = [name, f"{ranks[0].files[name] / MIB:.1f}"]
        for act, size in enumerate((ranks[0].files[name], sum(rank.held for rank in ranks))):
            median = statistics.median(seconds(ranks, name, act))
            speed = f"{size / MIB / median:.0f}"
            cells += [f"{median:.3f}", speed, against_raw(ranks, name, act)]
        yield cells


def asynchronous_rows(ranks: Ranks) -> Iterator[Sequence[str]]:
    """Yield a row for each way; the stall of the first save is separate."""
    every = [each for repeats in ranks[0].behind.values() for each in repeats]
    usual = statistics.median(step for each in every for step in each.before)
    for name in ASYNCHRONOUS:
        repeats = list(zip(*(rank.behind[name] for rank in ranks), strict=True))
        stalls = [1e3 * max(each.stall for each in together) for together in repeats]
        later = [max(together, key=lambda each: each.total) for together in repeats[1:]]
        lost = [each.stall + sum(each.steps) - len(each.steps) * usual for each in later]
        slower = [statistics.mean(each.steps) / usual for each in later if each.steps]
        yield [
            name, f"{stalls[0]:.0f}", f"{statistics.median(stalls[1:]):.0f}",
            f"{1e3 * usual:.0f}", f"{statistics.median(slower):.2f}" if slower else "",
            f"{1e3 * statistics.median(lost):.0f}",
            f"{statistics.median(each.total for each in later):.3f}",
        ]  # fmt: skip


def growth_rows(found: Mapping[tuple[str, Layout], Ranks]) -> Iterator[Sequence[str]]:
    """Yield how times grow from the smaller to the larger model."""
    least, most = SIZES
    for layout in (layout for size, layout in found if size == most):
        small, large = found[least, layout], found[most, layout]
        for name in SYNCHRONOUS:
            cells = [str(layout), name, f"{large[0].files[name] / small[0].files[name]:.2f}"]
            for act in (SAVE, LOAD):
                times = [statistics.median(seconds(each, name, act)) for each in (small, large)]
                cells += [f"{times[0]:.3f}", f"{times[1]:.3f}", f"{times[1] / times[0]:.2f}"]
            yield cells


SYNC_COLUMNS = ["way", "files MiB", "save s", "MiB/s", "/ raw", "load s", "MiB/s", "/ raw"]
ASYNC_COLUMNS = [
    "way", "first stall ms", "stall ms", "usual step ms", "step ratio", "lost ms", "until wait s",
]  # fmt: skip
GROWTH_COLUMNS = [
    "layout", "way", "bytes x", "save s", "larger", "x", "load s", "larger", "x",
]  # fmt: skip
SIZES = {"21 M": SMALL, "101 M": LARGE}
ALONE, DP, ZERO, TP = Layout(), Layout(dp=2), Layout(dp=2, zero=True), Layout(tp=2)
PLAN = {
    "21 M": {ALONE: Repeats(5, 4), DP: Repeats(5, 3), ZERO: Repeats(5, 3), TP: Repeats(3, 0)},
    "101 M": {ALONE: Repeats(3, 2), DP: Repeats(3, 0), ZERO: Repeats(3, 0)},
}
QUICK = {"21 M": {ALONE: Repeats(2, 2), ZERO: Repeats(2, 2)}}


def report(quick: bool) -> Iterator[str]:
    """Yield the lines to print."""
    yield machine()
    found: dict[tuple[str, Layout], Ranks] = {}
    for size, layouts in (QUICK if quick else PLAN).items():
        for layout, repeats in layouts.items():
            start = time.perf_counter()
            with (
                tempfile.TemporaryDirectory() as folder,
                RankPool(layout.dp * layout.tp, timeout=None) as pool,
            ):
                ranks = pool.run(measure, SIZES[size], layout, Path(folder), repeats)
            found[size, layout] = ranks
            took = f"{repeats.saves} repeats, {time.perf_counter() - start:.0f} s"
            yield f"\n### {size} parameters, {layout}: {took}\n"
            yield table(SYNC_COLUMNS, synchronous_rows(ranks))
            if repeats.behind:
                yield f"\nBehind steps:\n\n{table(ASYNC_COLUMNS, asynchronous_rows(ranks))}"
    if not quick:
        yield f"\n### Growth from 21 M to 101 M\n\n{table(GROWTH_COLUMNS, growth_rows(found))}"


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument(
        "--quick", action="store_true", help="the smaller model alone, fewer times"
    )
    command.add_argument("--out", type=Path, help="file that gets the tables too")
    options = command.parse_args()
    preload("torch.distributed.tensor", "torch.distributed.checkpoint")
    publish(report(options.quick), options.out)


if __name__ == "__main__":
    main()

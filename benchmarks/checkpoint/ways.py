"""The ways to save and load that are compared, and the training that makes the state."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from scaletorch.checkpoint import load, save
from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import setup_process_group_manager

OURS, RAW, CHECKED, TORCH, DCP = "ours", "raw", "raw and crc32", "torch.save", "DCP"
CACHED = "DCP, buffers kept"
BLOCK = 2**22  # bytes under one checksum, as in ours
LENGTH = 16  # tokens of a sequence: steps are short, so that many run during one save


@dataclass(frozen=True)
class Layout:
    """A grid, and whether the optimizer's state is sharded over dp."""

    dp: int = 1
    tp: int = 1
    zero: bool = False

    def __str__(self) -> str:
        if self.dp * self.tp == 1:
            return "one process"
        return f"dp {self.dp}{', ZeRO-1' if self.zero else ''}" if self.dp > 1 else f"tp {self.tp}"


class KeptBuffers(BlockingAsyncStager):
    """Copies into the same memory each time; torch's own stager does so only with a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy flat tensors."""
        for name, each in state_dict.items():
            if name not in self._kept:
                self._kept[name] = torch.empty_like(each)
            self._kept[name].copy_(each)
        return self._kept


class Job:
    """A model and AdamW after one step, on one rank.

    Attributes:
        rank: The rank.
        written: Bytes that ours writes on this rank, and therefore the raw ways too.
        held: Bytes of all tensors on this rank.
    """

    def __init__(self, size: LlamaConfig, layout: Layout) -> None:
        self.layout, self.rank = layout, dist.get_rank()
        self.manager = setup_process_group_manager(
            tp_size=layout.tp, cp_size=1, pp_size=1, dp_size=layout.dp
        )
        torch.manual_seed(1)
        self.model = parallelize(Llama(size), self.manager)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if layout.zero:
            shard_optimizer(self.optimizer, self.model)
        tokens = torch.randint(size.vocab_size, (layout.dp, LENGTH + 1))
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
        self._batches = shard_global_batch(batch, 1, self.manager)
        self.step()
        self.side_group = dist.new_group(backend="gloo")  # for background saves
        self.stager = KeptBuffers()
        self.thread = ThreadPoolExecutor(1)
        self.written, self.held = 0, sum(each.nbytes for each in self.tensors().values())
        self.memory = bytearray(self.held)
        self.fill_memory(self.held)

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        train_step(self.model, self._batches)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors on this rank; equal names on several ranks mean equal tensors."""
        everywhere, cut = "", f"{self.rank}/"
        name = cut if self.layout.tp > 1 else everywhere
        found = {f"{name}{key}": each for key, each in self.model.state_dict().items()}
        name = cut if self.layout.zero else name
        updated = [each for group in self.optimizer.param_groups for each in group["params"]]
        for number, each in enumerate(updated):
            state = self.optimizer.state.get(each, {})
            found |= {f"{name}state.{number}.{key}": value for key, value in state.items()}
        return found

    def fill_memory(self, size: int) -> None:
        """Copy the first bytes of the tensors into the raw ways' buffer."""
        memory, begin = torch.frombuffer(self.memory, dtype=torch.uint8), 0
        for each in self.tensors().values():
            part = each.detach().reshape(-1).view(torch.uint8)[: size - begin]
            memory[begin : begin + len(part)].copy_(part)
            begin += len(part)


def raw_save(job: Job, folder: Path, *, checked: bool = False) -> None:
    """Write one file and wait for the disk."""
    memory = memoryview(job.memory)[: job.written]
    file = os.open(folder / f"{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for part in parts(memory, BLOCK if checked else 2**30):
        if checked:
            zlib.crc32(part)
        while part:
            part = part[os.write(file, part) :]
    os.fsync(file)
    os.close(file)


def raw_load(job: Job, folder: Path, *, checked: bool = False) -> None:
    """Read as many bytes as this rank's tensors have, first from its own file."""
    memory = memoryview(job.memory)
    for path in sorted(folder.iterdir(), key=lambda path: path.name != f"{job.rank}"):
        with path.open("rb", buffering=0) as file:
            while memory and (read := file.readinto(memory[:BLOCK] if checked else memory)):
                if checked:
                    zlib.crc32(memory[:read])
                memory = memory[read:]


def parts(memory: memoryview, size: int) -> Iterator[memoryview]:
    """Split memory into pieces of a size."""
    for begin in range(0, len(memory), size):
        yield memory[begin : begin + size]


def torch_save(job: Job, folder: Path) -> None:
    """Save by torch.save what no lower rank has, and wait for the disk."""
    own = {k: v for k, v in job.tensors().items() if job.rank == 0 or "/" in k}
    if own:
        path = folder / f"{job.rank}.pt"
        torch.save(own, path)
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


@torch.no_grad()
def torch_load(job: Job, folder: Path) -> None:
    """Copy from mapped files, which is faster than reading them first."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.iterdir()):
        found |= torch.load(path, weights_only=True, mmap=True)
    for name, each in job.tensors().items():
        each.copy_(found[name])


def dcp_save(job: Job, folder: Path) -> None:
    """Save by torch.distributed.checkpoint's own storage."""
    state_dict_saver.save(job.tensors(), storage_writer=FileSystemWriter(folder))


def dcp_load(job: Job, folder: Path) -> None:
    """Load in place."""
    state_dict_loader.load(job.tensors(), storage_reader=FileSystemReader(folder))


def ours_save(job: Job, folder: Path) -> None:
    """Save."""
    save(folder, job.model, job.optimizer, job.manager, step=1)


def ours_load(job: Job, folder: Path) -> None:
    """Load."""
    load(folder, job.model, job.optimizer, job.manager)


Pending = tuple[Callable[[], bool], Callable[[], object]]  # done, wait
Act = Callable[[Job, Path], None]
SYNCHRONOUS: dict[str, tuple[Act, Act]] = {
    RAW: (raw_save, raw_load),
    CHECKED: (partial(raw_save, checked=True), partial(raw_load, checked=True)),
    TORCH: (torch_save, torch_load),
    DCP: (dcp_save, dcp_load),
    OURS: (ours_save, ours_load),
}


def raw_begin(job: Job, folder: Path) -> Pending:
    """Copy this rank's bytes and write them in a thread."""
    job.fill_memory(job.written)
    return _pending(job.thread.submit(raw_save, job, folder))


def dcp_begin(job: Job, folder: Path, *, kept: bool = False) -> Pending:
    """Save by async_save; without a stager it allocates new buffers each time."""
    stager: Any = job.stager if kept else None
    future: Any = state_dict_saver.async_save(
        job.tensors(),
        storage_writer=FileSystemWriter(folder),
        process_group=job.side_group,
        async_stager=stager,
    )
    return _pending(getattr(future, "upload_completion", future))


def ours_begin(job: Job, folder: Path) -> Pending:
    """Save in the background."""
    saving = save(folder, job.model, job.optimizer, job.manager, step=1, asynchronous=True)
    return saving.done, saving.wait


def _pending(future: Future[Any]) -> Pending:
    return future.done, future.result


ASYNCHRONOUS: dict[str, Callable[[Job, Path], Pending]] = {
    RAW: raw_begin, DCP: dcp_begin, CACHED: partial(dcp_begin, kept=True), OURS: ours_begin,
}  # fmt: skip

"""Saving: describe the state, assign it to ranks, and write it now or in the background."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..dist import get_rank
from ..dist.building import agree
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import ProcessGroupManager
from .agreement import CheckpointError, Ranks, find_manager
from .format import folders, metadata
from .format.metadata import canonical, check_whole, encode, seal
from .format.safetensors_files import flush
from .state.model_tensors import device_of, find_shards, find_tensors, find_ties
from .state.optimizer import encode_groups, record_shard
from .state.record import Entry, Index, Record, record_random, seed_material, share_out, stage
from .storage import write_chunks

_buffers: weakref.WeakKeyDictionary[nn.Module, dict[Index, Tensor]] = weakref.WeakKeyDictionary()
_last: Saving | None = None


class Saving:
    """A checkpoint that is being written, or is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # its final folder, which exists once the checkpoint is finished
        self._written = Future[None]()

    def _start(self, write: Callable[[], None], asynchronous: bool) -> None:
        """Write now, or in a non-daemon thread, so that the program waits for it when it ends."""
        global _last
        if asynchronous:
            name = f"checkpoint {self.folder.name}"
            threading.Thread(target=self._run, args=(write,), name=name, daemon=False).start()
            _last = self
        else:
            self._run(write)
            self.wait()

    def _run(self, write: Callable[[], None]) -> None:
        """Call `write`, and keep its error for `wait`."""
        try:
            write()
        except Exception as error:
            self._written.set_exception(error)
        else:
            self._written.set_result(None)

    def done(self) -> bool:
        """Return whether writing has ended on this rank, with or without an error."""
        return self._written.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is finished on every rank; return its folder.

        Raises:
            CheckpointError: It could not be written; the same on every rank and in every call.
        """
        global _last
        error = self._written.exception()
        if _last is self:
            _last = None
        if error is not None:
            raise error
        return self.folder


def wait_for_last() -> None:
    """Wait for the background save, if there is one, and raise its error."""
    if _last is not None:
        _last.wait()


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    manager: ProcessGroupManager | None = None,
    *,
    step: int,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Write a checkpoint that any other layout can load; all ranks call it.

    The folder `step-<zero-padded step>` appears once everything is on the disk, and not before. A
    save waits for an earlier one in the background, and raises its error. From the first save
    until the model's parameters or this process end, no other job can save into `folder`.

    Args:
        folder: Holds the checkpoints; shared by all machines.
        model: The module that `parallelize` returned, or any other.
        optimizer: Optimizer of the model's parameters, or of their shards.
        manager: The grid; None is the current one, or one process.
        step: The number of steps done.
        scheduler: Any object whose `state_dict` has plain values only.
        extra: Plain values to get back, such as the position in the data; equal on all ranks.
        keep: Remove finished checkpoints before the last `keep`; None keeps all.
        asynchronous: Copy the state, and write the copy while training goes on.

    Returns:
        The checkpoint; call `wait` if `asynchronous`, otherwise it is finished already.

    Raises:
        InvalidArgumentError: State that a checkpoint cannot hold.
        MismatchError: Ranks were given different arguments, or another rank failed before.
        CheckpointError: A rank could not write, or another job writes there; on every rank.
    """
    ranks, root = Ranks(), Path(folder).absolute()
    lines: list[str] = []
    failed: Exception | None = None
    try:
        wait_for_last()
        manager = find_manager(manager)
        document = _document(manager, step, optimizer, scheduler, extra, keep)
        lines = [f"{key}: {canonical(value)}" for key, value in document.items() if key != "seed"]
        lines += [f"folder: {folder}", f"keep: {keep}", f"asynchronous: {asynchronous}"]
        record = _record(model, optimizer, manager)
        entries = share_out(record, manager)
        if asynchronous:
            entries = stage(entries, _buffers.setdefault(model, {}))
    except Exception as error:  # any kind: the other ranks must know
        failed = error
    agree("the checkpoint to save", lines, ranks.group, error=failed)
    owner = next(model.parameters(), model)  # `model` may be a wrapper that ends before it
    ranks.on_first(lambda: folders.lock(root, owner))
    notes: dict[str, Mapping[str, Any]] = {"scalars": record.scalars, "ties": record.ties}
    write = partial(_write, entries, notes, root, keep, document, ranks)
    saving = Saving(folders.step_folder(root, step))
    saving._start(write, asynchronous)
    return saving


def _write(
    entries: Mapping[str, Entry],
    notes: Mapping[str, Mapping[str, Any]],
    root: Path,
    keep: int | None,
    document: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Write one file per rank, then the description of all, and give the folder its final name."""
    step = document["step"]
    folder = folders.step_folder(root, step, folders.UNFINISHED)

    def write() -> tuple[Any, Any]:
        path = folder / f"rank-{get_rank():05d}.safetensors"
        return write_chunks(path, entries, step), notes

    def finish(reports: list[tuple[Any, Any]]) -> None:
        saved: dict[str, Any] = {}
        joined: dict[str, dict[str, Any]] = {}
        for written, noted in reports:
            for name, entry in written.items():
                known = saved.setdefault(name, entry | {"chunks": []})["chunks"]
                places = {chunk["at"] for chunk in known}  # several ranks may write the same chunk
                known += [chunk for chunk in entry["chunks"] if chunk["at"] not in places]
            for kind, note in noted.items():
                joined.setdefault(kind, {}).update(note)
        check_whole(folder, saved)
        described = {**document, **joined, "files": _sizes(folder, saved), "entries": saved}
        with (folder / metadata.METADATA).open("x", encoding="utf-8") as file:
            file.write(seal(described))
            flush(file)
        folders.finish(root, step, keep)

    what = f"saving {folders.step_folder(root, step)} failed"
    ranks.collect(what, lambda: None, lambda _: folders.start(root, step))
    ranks.collect(what, write, finish)


def _sizes(folder: Path, saved: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of all ranks' files."""
    sizes = {}
    for name in sorted({chunk["file"] for entry in saved.values() for chunk in entry["chunks"]}):
        try:
            sizes[name] = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"another rank wrote {folder / name}, and rank 0 cannot see it: pass a folder that "
                "all machines share"
            ) from error
    return sizes


def _document(
    manager: ProcessGroupManager,
    step: int,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
    keep: int | None,
) -> dict[str, Any]:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        raise InvalidArgumentError(f"step must be an integer of at least 0, got {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise InvalidArgumentError(f"keep must be None or an integer of at least 1, got {keep!r}")
    if not isinstance(extra, Mapping | None):
        raise InvalidArgumentError(f"extra must be a mapping of plain values, got {extra!r:.60}")
    grid, programs = manager.grid, {"optimizer": optimizer, "scheduler": scheduler}
    state = None if scheduler is None else encode(dict(scheduler.state_dict()), "the scheduler")
    return {
        "step": step,
        "grid": {"dp": grid.dp, "pp": grid.pp, "cp": grid.cp, "tp": grid.tp},
        "seed": seed_material(step),
        "kinds": {kind: type(each).__name__ for kind, each in programs.items() if each is not None},
        "groups": None if optimizer is None else encode_groups(optimizer),
        "scheduler": state,
        "extra": encode(dict(extra or {}), "extra"),
    }


def _record(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, manager: ProcessGroupManager
) -> Record:
    """Describe all state on this rank: model, masters, optimizer and random generators."""
    record = Record()
    held = find_tensors(model, manager)
    record.ties = find_ties(held.values())
    for each in held.values():
        if each.first:
            found = [*each.rectangles(each.tensor)]
            entry = Entry(each.shape, each.tensor.dtype, found, replicas=each.replicas)
            record.add(f"model.{each.name}", entry)
    for shard, own in find_shards(model, held, optimizer, manager):
        if own.first:
            state = {} if optimizer is None else optimizer.state.get(shard.tensor, {})
            owns = manager.tp_rank == 0 or shard.tensor is own.tensor
            writes = owns and (manager.cp_dp_rank == 0 or not shard.replicated)
            writes = writes or own.experts is not None  # several ranks may write equal scalars
            record_shard(record, shard, own, state, writes=writes)
    record_random(record, manager, device_of(held.values()))
    return record

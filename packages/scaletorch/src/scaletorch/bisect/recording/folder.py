"""A recording on disk: a file of tensors and a file of lines for each rank and step.

Tensors are written as they come. The lines are written as JSON when the recording ends; a recording
that was interrupted lacks them, and `read` refuses it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError

T = TypeVar("T")
VERSION = 5
_ALIGNED = 64  # bytes; any dtype can be viewed in place


@dataclass(slots=True)
class Line:
    """A tensor of a recording."""

    kind: str  # as in `keys.Key`
    name: str = ""  # as in `keys.Key`
    item: str = ""  # as in `keys.Key`
    # Number of earlier calls of the module in this step; of the model for a term. For an entry of
    # the batch, the micro-batch.
    call: int = 0
    dtype: str = ""  # without 'torch.'
    shape: list[int] = field(default_factory=list)  # shape of this rank's tensor
    offset: int = -1  # its first byte in the file; -1 if it is the tensor of line `same`
    same: int = -1  # a line of the same tensor, or -1
    # lines of the tensors that it was computed from
    parents: list[int] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)  # parameters that it was computed with
    inside: str | None = None  # the module whose code was running
    # per dim, its indices in the full tensor as [whole size, [start, stop], ...], or None if
    # only the rank's description gives it
    place: list[Any] | None = None
    sums: bool = False  # whether ranks' tensors have to be added up
    stage: int = 0  # the pipeline stage whose code was running


def first_name(lines: Sequence[Line], number: int) -> int:
    """Return the line that has the tensor of line `number`, which may be another name of it."""
    while lines[number].same >= 0:
        number = lines[number].same
    return number


class Writer:
    """Writes a rank's recording of a step; `header` has facts that hold for all tensors."""

    def __init__(self, folder: Path, rank: int, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.header = {"version": VERSION, "rank": rank, **header}
        self.lines: list[Line] = []
        self._index = folder / f"step{header['step']}.rank{rank}.json"
        self._index.unlink(missing_ok=True)
        self._file = self._index.with_suffix(".bin").open("wb")
        self._end = 0

    def add(self, line: Line, tensor: Tensor | None) -> int:
        """Append a line, and its tensor if there is one; return the line's number."""
        if tensor is not None:
            line.offset = self._end
            data = tensor.detach().cpu().contiguous()
            if size := data.numel() * data.element_size():
                self._file.write((ctypes.c_char * size).from_address(data.data_ptr()))
            self._file.write(bytes(-size % _ALIGNED))
            self._end += size + -size % _ALIGNED
        self.lines.append(line)
        return len(self.lines) - 1

    def close(self, failed: str = "") -> None:
        """Write the lines; `failed` is the reason if the recording ends early."""
        self._file.close()
        content = {
            **self.header, "failed": failed, "bytes": self._end,
            "lines": [list(asdict(line).values()) for line in self.lines],
        }  # fmt: skip
        part = self._index.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(self._index)


@dataclass(frozen=True, slots=True)
class Recording:
    """The recording of one step on one rank."""

    header: dict[str, Any]  # facts about the step that are the same for all tensors
    lines: list[Line]  # one for each tensor
    path: Path  # the file of the tensors
    # unique among the recordings of this process
    number: int = field(default_factory=itertools.count().__next__)
    _cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The global rank."""
        return int(self.header["rank"])

    def cached(self, key: Any, compute: Callable[[], T]) -> T:
        """Return what `compute` returns, which depends on nothing but the recording and the key."""
        if key not in self._cache:
            self._cache[key] = compute()
        found: T = self._cache[key]
        return found

    def tensor(self, number: int) -> Tensor:
        """Return the tensor of a line, read from the file."""
        line = self.lines[first_name(self.lines, number)]
        found = torch.empty(line.shape, dtype=getattr(torch, line.dtype))
        if size := found.numel() * found.element_size():
            with self.path.open("rb") as file:
                file.seek(line.offset)
                file.readinto((ctypes.c_char * size).from_address(found.data_ptr()))
        return found


def read(folder: Path) -> dict[int, list[Recording]]:
    """Return a folder's recordings by step, those of all ranks in order; refuse incomplete ones."""
    steps: dict[int, list[Recording]] = {}
    found = sorted(folder.glob("step*.rank*.bin")) if folder.is_dir() else []
    if not found:
        raise InvalidArgumentError(
            f"{folder} has no recording: pass a folder that `scaletorch.bisect.record` wrote"
        )
    for path in found:
        recording = _read_rank(path)
        steps.setdefault(int(recording.header["step"]), []).append(recording)
    for step, recordings in steps.items():
        recordings.sort(key=lambda each: each.rank)
        ranks = [each.rank for each in recordings]
        if (sizes := {each.header["world_size"] for each in recordings}) != {len(ranks)}:
            raise InvalidArgumentError(
                f"{folder} has step {step} of ranks {ranks}, recorded by {sorted(sizes)} ranks: "
                "record on all ranks, and each run into a new folder"
            )
    return dict(sorted(steps.items()))


def _read_rank(path: Path) -> Recording:
    index = path.with_suffix(".json")
    try:
        content = json.loads(index.read_text())
        lines = [Line(*values) for values in content.pop("lines")]
        size, version = content["bytes"], content["version"]
    except FileNotFoundError:
        message = f"{path} is incomplete: the program ended before the recording"
        raise InvalidArgumentError(message) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{index} is not the index of a recording: {error}") from None
    if version != VERSION:
        raise InvalidArgumentError(f"{index} has version {version}, this library reads {VERSION}")
    if content["failed"]:
        raise InvalidArgumentError(f"{index}: the recorded step failed: {content['failed']}")
    if path.stat().st_size != size:
        raise InvalidArgumentError(
            f"{path} is incomplete: it has {path.stat().st_size} bytes, and {size} were written"
        )
    return Recording(content, lines, path)

"""Whether a checkpoint's description says what `save` writes, before anything of it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...dist.errors import ScaletorchError
from ..errors import DamagedCheckpointError
from .boxes import tile
from .files import BLOCK, regular_size
from .metadata import FILE_NAME
from .values import check_depth, decode, is_nan, is_number, named_dtype

_MOST = 2**63  # numbers that a tensor can hold


def check_document(document: Mapping[str, Any], folder: Path) -> None:
    """Refuse a description with a field that `save` would not have written.

    A digest shows accidents; this keeps a description that was made, or changed with its digest,
    from failing half-way through a load.

    Raises:
        DamagedCheckpointError: The field, and what it holds.
    """
    for name, check in _CHECKS.items():
        if name in document:
            try:
                fine = check(document[name])
            except ScaletorchError:
                raise
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
                    RuntimeError, RecursionError):  # fmt: skip
                fine = False
            if not fine:
                shown = repr(document[name])[:60]
                raise DamagedCheckpointError(f"{folder}: its {name} is {shown}, as none is saved")
    _check_sizes(document, folder)
    check_entries(document["entries"], folder)
    _check_state(document, folder)


def _count(value: object, below: int = _MOST) -> bool:
    return type(value) is int and 0 <= value < below


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(_count(each) for each in value)


def _is_grid(value: Mapping[str, Any]) -> bool:
    axes = {"dp", "pp", "cp", "tp"}
    return set(value) == axes and all(_count(size) and size for size in value.values())


def _are_kinds(value: Mapping[str, Any]) -> bool:
    return set(value) == {"optimizer", "scheduler"} and all(
        kind is None or isinstance(kind, str) for kind in value.values()
    )


def _are_groups(value: list[dict[str, Any]] | None) -> bool:
    """None, or mappings of hyperparameters, none of them NaN."""
    if value is None:
        return True
    return isinstance(value, list) and all(
        isinstance(group, dict) and not any(is_nan(decode(each)) for each in group.values())
        for group in value
    )


def _is_mapping(value: Any) -> bool:
    check_depth(value)
    return isinstance(decode(value), dict)


def _are_ties(value: dict[str, list[str]]) -> bool:
    return _are_keys(value) and all(
        first in names and len(names) > 1 for first, names in value.items()
    )


def _are_scalars(value: dict[str, Any]) -> bool:
    for name, number in value.items():
        own, _, key = name.removeprefix("optimizer.").rpartition(".")
        if not name.startswith("optimizer.") or not own or not key:
            return False
        check_depth(number)
        found = decode(number)
        if key == "step" and not (is_number(found) and 0 <= float(found) < math.inf):
            return False
    return True


def _are_files(value: dict[str, int]) -> bool:
    return all(FILE_NAME.fullmatch(name) and _count(size) for name, size in value.items())


def _are_keys(value: dict[str, list[str]]) -> bool:
    return all(
        isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        for keys in value.values()
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "step": _count,
    "grid": _is_grid,
    "seed": lambda value: _count(value, 2**64),
    "kinds": _are_kinds,
    "groups": _are_groups,
    "scheduler": lambda value: value is None or _is_mapping(value),
    "extra": _is_mapping,
    "ties": _are_ties,
    "scalars": _are_scalars,
    "state": _are_keys,
    "files": _are_files,
    "entries": lambda value: all(map(_is_entry, value.values())),
}


def _is_entry(entry: Mapping[str, Any]) -> bool:
    size = named_dtype(entry["dtype"]).itemsize
    return _counts(entry["shape"]) and all(_is_chunk(chunk, size) for chunk in entry["chunks"])


def _is_chunk(chunk: Mapping[str, Any], itemsize: int) -> bool:
    length, sums = chunk["length"], chunk["crc32"]
    return (
        _counts(chunk["at"])
        and _counts(chunk["shape"])
        and _count(chunk["offset"])
        and _count(length)
        and length == math.prod(chunk["shape"]) * itemsize
        and isinstance(sums, list)
        and len(sums) == -(-length // BLOCK)
        and all(_count(each, 2**32) for each in sums)
    )


def _check_sizes(document: Mapping[str, Any], folder: Path) -> None:
    """Compare the files with what was written, and with what the entries have in them."""
    used = dict.fromkeys(document["files"], 0)
    for entry in document["entries"].values():
        for chunk in entry["chunks"]:
            if chunk["file"] not in used:
                raise DamagedCheckpointError(f"{folder}: a chunk is in {chunk['file']!r:.60}")
            used[chunk["file"]] += chunk["length"]
    for name, size in document["files"].items():
        found = regular_size(folder / name)
        if found != size:
            raise DamagedCheckpointError(
                f"{folder / name} has {found} bytes and was saved with {size}"
            )
        if used[name] > size:
            raise DamagedCheckpointError(
                f"{folder / name} has {size} bytes and is to hold {used[name]}"
            )


def check_entries(entries: Mapping[str, Any], folder: Path) -> None:
    """Refuse tensors that their chunks do not make up.

    Raises:
        DamagedCheckpointError: The first of them.
    """
    for name, entry in entries.items():
        boxes = [(tuple(chunk["at"]), tuple(chunk["shape"])) for chunk in entry["chunks"]]
        dims = len(entry["shape"])
        inside = all(
            len(at) == len(sizes) == dims
            and all(low + size <= whole for low, size, whole in zip(at, sizes, entry["shape"],
                                                                    strict=True))
            for at, sizes in boxes
        )  # fmt: skip
        if not inside or not tile(boxes, entry["shape"]):
            raise DamagedCheckpointError(
                f"{folder}: the {len(boxes)} chunks of {name} do not make up its {entry['shape']}"
            )


def _check_state(document: Mapping[str, Any], folder: Path) -> None:
    """See that all is there that the optimizer kept; what older versions saved does not tell."""
    for name, keys in document.get("state", {}).items():
        for key in keys:
            entry = f"optimizer.{name}.{key}"
            if entry not in document["entries"] and entry not in document["scalars"]:
                raise DamagedCheckpointError(f"{folder} lacks {entry}, the optimizer's state")

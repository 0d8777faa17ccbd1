"""Load safetensors checkpoints; each rank reads only its shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError, StateError
from ...pg_manager import describe_rank
from .whole import ParameterCut, check_names, find_cuts

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_safetensors(model: nn.Module, folder: str | Path, *, strict: bool = True) -> None:
    """Load a checkpoint of the plain model; each rank reads only its shards.

    Rows and columns of other ranks are never read; the largest tensor in memory, apart from the
    model, is one piece of one shard. Values are cast to the model's dtypes. There is no
    communication: every rank opens the files. If the model is on the meta device, first call
    `model.to_empty(device=...)`. As this unties parameters, tie them again before loading, and fill
    buffers that are not in the state dict (such as rotary ones in `transformers`).

    Args:
        model: A model with tensor-parallel layers.
        folder: Contains `model.safetensors`, or `model.safetensors.index.json` and the files that
            it names, as written by `save_pretrained` of `transformers`. Names are the plain
            model's; one name of a tied parameter is enough.
        strict: Refuse missing and unknown names.

    Raises:
        InvalidArgumentError: Names or shapes are not the plain model's, the files are missing or
            broken, or the model is on the meta device; nothing was loaded.
        StateError: The safetensors library is not installed.

    Example:
        >>> load_safetensors(apply_tensor_parallel(model), "Llama-3.2-1B")
    """
    own = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    files, cuts = _find_files(Path(folder)), find_cuts(model)
    shapes = {name: shape for file in files for name, shape in _shapes(file, files[file]).items()}
    given = {id(own[name]) for name in shapes if name in own}
    if strict:
        check_names(f"the model has no tensor for these of {folder}:", set(shapes) - set(own))
        lacking = {name for name, tensor in own.items() if id(tensor) not in given}
        check_names(f"{folder} lacks these of the model (is a tie undone?):", lacking)
    for name in (n for n in own if n in shapes):
        _check_shape(name, own[name], cuts.get(name), shapes[name])
    check_names(
        "these are on the meta device, call model.to_empty(device=...) first:",
        {name for name in shapes if name in own and own[name].is_meta},
    )
    for file, names in files.items():
        with _open(file) as handle, torch.no_grad():
            for name in (n for n in names if n in own):
                _read(handle.get_slice(name), own[name], cuts.get(name))


def _find_files(folder: Path) -> dict[Path, list[str]]:
    """Return file -> names of the tensors to read from it.

    Raises:
        InvalidArgumentError: There are no files, or the index is broken.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file():
        with _open(whole) as handle:
            return {whole: sorted(handle.keys())}
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, file in weights.items():
            files.setdefault(folder / file, []).append(name)
    except FileNotFoundError:
        message = f"{describe_rank()}: {folder} has neither {WHOLE} nor {INDEX}"
        raise InvalidArgumentError(message) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{describe_rank()}: {index} has no weight_map of names and files: {error!r}"
        raise InvalidArgumentError(message) from error
    return files


def _shapes(file: Path, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors from a file's header."""
    with _open(file) as handle:
        check_names(f"the index places in {file} what it lacks:", set(names) - set(handle.keys()))
        return {name: tuple(handle.get_slice(name).get_shape()) for name in names}


def _check_shape(name: str, own: Tensor, cut: ParameterCut | None, shape: tuple[int, ...]) -> None:
    whole = tuple(own.shape) if cut is None else cut.whole(own.shape)
    if shape != whole:
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' has shape {shape} in the file, "
            f"but {whole} in the plain model"
        )


def _read(source: Any, target: Tensor, cut: ParameterCut | None) -> None:
    """Fill this rank's tensor from the file, piece by piece."""
    if cut is None or cut.layer.tp_size == 1:
        target.copy_(source[...])
        return
    before = (slice(None),) * cut.dim
    ranges = cut.cut.ranges[cut.layer.tp_rank]
    pieces = target.split([len(piece) for piece in ranges], cut.dim)
    for ours, piece in zip(ranges, pieces, strict=True):
        piece.copy_(source[(*before, slice(ours.start, ours.stop))])


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        safetensors: Any = import_module("safetensors")
    except ImportError as error:
        raise StateError(
            "load_safetensors needs the safetensors library: pip install scaletorch-tp[safetensors]"
        ) from error
    try:
        with safetensors.safe_open(file, framework="pt") as handle:
            yield handle
    except (safetensors.SafetensorError, OSError) as error:
        message = f"{describe_rank()}: {file} cannot be read as safetensors: {error}"
        raise InvalidArgumentError(message) from error

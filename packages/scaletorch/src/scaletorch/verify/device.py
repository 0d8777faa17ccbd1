"""The kind of device on which a proof runs, and the backend that connects its ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dist import devices, get_local_rank
from ..dist.building import map_tensors
from ..dist.errors import InvalidArgumentError


class Where(NamedTuple):
    """A kind of device as in `torch.device`, without index, and a backend for it."""

    device: str = "cpu"
    backend: str = "gloo"

    def __str__(self) -> str:
        """Return the words for a report; '' for gloo on the CPU."""
        return "" if self == HERE else f" on {self.device} over {self.backend}"


HERE = Where()


def choose_where(device: str | None, backend: str | None) -> Where:
    """Return the device and backend to run on, by default this machine's accelerator if any.

    `device` and `backend` are as for `verify`.
    """
    own = devices.default_entry().device
    if device not in (None, "cpu", own):
        known = "'cpu'" if own == "cpu" else f"'cpu' or {own!r}"
        raise InvalidArgumentError(f"device must be {known} on this machine, got {device!r}")
    device = device or own
    if backend is None:
        return Where(device, "gloo" if device == "cpu" else devices.default_backend())
    for _, name in devices.resolve_backend(backend):
        if problem := devices.backend_problem(name):
            raise InvalidArgumentError(f"backend {backend!r} cannot be used: {problem}")
    return Where(device, backend)


def repeating(device: str | None, backend: str | None) -> str:
    """Return the command of the proof with the given device and backend."""
    words = [f"--device {device}"] * bool(device) + [f"--backend {backend}"] * bool(backend)
    return " ".join([f"python -m {__package__}", *words])


NAMED = (
    "model",
    "batch",
    "plan",
    "loss_fn",
    "optimizer",
)  # module-level objects, or names
VALUES = ("optimizer_args", "row_dims", "sequence_dims")  # mappings, or 'name=value' words


def named(settings: Mapping[str, Any]) -> str:
    """Return the command line options that repeat a run with these settings of `verify`."""
    words = ""
    for name in NAMED:
        if (given := settings.get(name)) is not None:
            words += f" --{name.removesuffix('_fn')} {name_of(given)}"
    for name in VALUES:
        if given := settings.get(name):
            pairs = [f"{n}={v}" for n, v in given.items()] if isinstance(given, Mapping) else given
            words += f" --{name.replace('_', '-')} {shlex.join(pairs)}"
    return words


def name_of(thing: Any) -> str:
    """Return the 'module:name' of an object for a command, or a placeholder if it has no name."""
    if isinstance(thing, str):
        return thing
    name = getattr(thing, "__qualname__", "<")
    return "MODULE:NAME" if "<" in name else f"{thing.__module__}:{name}"


def rank_device(device: str) -> torch.device:
    """Make this rank's device of a kind the current one, and return it."""
    return torch.device("cpu") if device == "cpu" else devices.set_device(get_local_rank())


def in_dtype(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Cast a batch's floating entries to the model's dtype, complex ones to its precision."""
    return {n: _cast(x, dtype) if isinstance(x, Tensor) else x for n, x in batch.items()}


def placed(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """Move a model to a device and a dtype; complex weights stay complex, in its precision."""
    model._apply(lambda x: _cast(x, dtype).to(device))
    return model


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return x.to(torch.promote_types(dtype, torch.float32).to_complex())
    return x.to(dtype) if x.is_floating_point() else x


def moved(data: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return a copy of data in which all tensors, nested ones too, are on a device."""
    return {name: map_tensors(lambda tensor: tensor.to(device), x) for name, x in data.items()}

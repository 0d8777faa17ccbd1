"""Tensors inside containers: on which device they are, and moving them all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import InvalidArgumentError


def get_data_device(data: Any) -> torch.device:
    """Find the one device that all tensors of `data` are on.

    Args:
        data: A tensor, or lists, tuples and mappings of tensors, nested as deep as you like.

    Raises:
        InvalidArgumentError: No tensor, something else than a tensor, or several devices.
    """
    devices = {tensor.device for tensor in _tensors(data)}
    if len(devices) != 1:
        found = " and ".join(sorted(map(str, devices))) or "no tensor at all"
        raise InvalidArgumentError(f"the tensors must all be on one device; found {found}")
    return devices.pop()


def cast_data_device(data: Any, device: torch.device | str, out: Any = None) -> Any:
    """Move every tensor of `data` to a device.

    Args:
        data: A tensor, or lists, tuples and mappings of tensors, nested as deep as you like.
        device: Where to.
        out: A structure like `data`, whose tensors are filled in place with the same values.

    Returns:
        The moved tensors, in containers of the same types.

    Raises:
        InvalidArgumentError: Something else than a tensor, no device, or an `out` of another
            structure.
    """
    if out is not None:
        _check_same_structure(data, out, "out")
    moved = _cast(data, _as_device(device))
    if out is not None:
        for target, source in zip(_tensors(out), _tensors(moved), strict=True):
            target.detach().copy_(source.detach())  # also a leaf that requires grad
    return moved


def _as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        message = f"{device!r} is no device: write one such as 'cpu' or 'cuda:0'"
        raise InvalidArgumentError(message) from error


def _items(data: Any) -> list[tuple[Any, Any]] | None:
    """(key, value) pairs of a container in a fixed order, None for a tensor."""
    if isinstance(data, Tensor):
        return None
    if isinstance(data, Mapping):
        return list(data.items())
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return list(enumerate(data))
    raise InvalidArgumentError(
        f"expected a tensor, or a list, tuple or mapping of tensors, not a {type(data).__name__}"
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or of a result: itself, or those inside, at any depth.

    That is in tuples, lists, mappings and dataclasses. Anything else is passed over.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, tuple | list):
        return
    for each in value:
        yield from tensors_in(each)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return arguments, or a result, with the tensors that `tensors_in` yields changed.

    Args:
        change: Called with each tensor; returns what takes its place.
        value: A tensor, or something with tensors in it at any depth.

    Returns:
        New containers of the same types; all that is neither tensor nor container as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return _like(value, enumerate([map_tensors(change, each) for each in value]))
    if isinstance(value, Mapping):
        return _like(value, [(key, map_tensors(change, each)) for key, each in value.items()])
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):  # set behind a frozen one's back, without its __init__
            each = map_tensors(change, getattr(value, field.name))
            object.__setattr__(made, field.name, each)
        return made
    return value


def _tensors(data: Any) -> Iterator[Tensor]:
    items = _items(data)
    if items is None:
        yield data
        return
    for _, value in items:
        yield from _tensors(value)


def _cast(data: Any, device: torch.device) -> Any:
    items = _items(data)
    if items is None:
        return data.to(device)
    return _like(data, [(key, _cast(value, device)) for key, value in items])


def _like(data: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a container like another one, with these entries instead."""
    if isinstance(data, MutableMapping):
        filled = copy.copy(data)  # keeps what a subclass has of its own, as defaultdict does
        for key, value in items:  # some refuse update, as the outputs of transformers do
            filled[key] = value
        return filled
    if isinstance(data, Mapping):
        return type(data)(dict(items))  # type: ignore[call-arg]
    values = [value for _, value in items]
    return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)


def _check_same_structure(data: Any, out: Any, where: str) -> None:
    items, slots = _items(data), _items(out)
    if items is None or slots is None:
        if items is not slots or data.shape != out.shape:
            raise InvalidArgumentError(f"{where} is {_say(out)}, the data there {_say(data)}")
        return
    if [key for key, _ in items] != [key for key, _ in slots]:
        raise InvalidArgumentError(
            f"{where} has entries {[key for key, _ in slots]}, "
            f"but the data there has {[key for key, _ in items]}"
        )
    for (key, value), (_, slot) in zip(items, slots, strict=True):
        _check_same_structure(value, slot, f"{where}[{key!r}]")


def _say(data: Any) -> str:
    if isinstance(data, Tensor):
        return f"a tensor of shape {tuple(data.shape)}"
    return f"a {type(data).__name__}"

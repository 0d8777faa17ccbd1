"""The state of modules: saving and restoring what a forward changes, and digests of tensors."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = (int, float, complex, str)
_PLAIN = (*_VALUES, type(None), Tensor)
_CONTAINERS = (list, dict, set, deque)
_OF_TORCH = frozenset(vars(nn.Module())) | {"_is_hf_initialized"}
# Packages of this library; tests and user code in the same namespace are not among them.
_OWN = tuple(
    f"{__name__.partition('.parallel.')[0]}.{each}."
    for each in ("parallel", "compose", "dist", "guard")
)


class Attributes:
    """A snapshot of the attributes of modules.

    Restoring binds each name to its old value, and gives containers and objects their old entries.
    A tensor that was changed in place keeps its new values.

    Args:
        modules: The modules.
        every: Save all attributes, including torch's own; else only the data among those that the
            module's own code sets: numbers, strings, None, tensors, containers and plain objects.
    """

    def __init__(self, modules: Iterable[nn.Module], *, every: bool = False) -> None:
        self._every = every
        self._held = [(module, self._of(module)) for module in modules]
        # id -> a container or the dict of an object, with a copy of its entries
        self._entries: dict[int, tuple[Any, Any]] = {}
        for _, held in self._held:
            for value in held.values():
                entries = _entries_of(value)
                if entries is not None and id(entries) not in self._entries:
                    self._entries[id(entries)] = entries, copy(entries)

    def changed(self) -> list[str]:
        """Return the names of the attributes that were changed, added or deleted since."""
        found: dict[str, None] = {}
        for module, held in self._held:
            now = self._of(module)
            for name in now.keys() | held.keys():
                if name not in now or name not in held or self._differs(held[name], now[name]):
                    found[name] = None
        return [*found]

    def _differs(self, before: Any, now: Any) -> bool:
        if before is not now:
            return not _are_equal(before, now)
        entries = _entries_of(now)
        held = None if entries is None else self._entries.get(id(entries))
        return entries is not None and (held is None or _ids(entries) != _ids(held[1]))

    def put_back(self) -> None:
        """Restore all attributes and delete those added since."""
        for module, held in self._held:
            for name in self._of(module).keys() - held.keys():
                del vars(module)[name]
            vars(module).update(held)
        for entries, before in self._entries.values():
            if _ids(entries) != _ids(before):
                entries.clear()
                (entries.extend if hasattr(entries, "extend") else entries.update)(before)

    def _of(self, module: nn.Module) -> dict[str, Any]:
        found = vars(module).items()
        return {n: x for n, x in found if self._every or (n not in _OF_TORCH and _is_data(x))}


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal numbers or strings, one object, or tuples of these."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    values = isinstance(one, _VALUES) and isinstance(other, _VALUES)
    return one is other or (values and bool(one == other))


def _have_equal_values(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:  # `equal` takes no sparse tensors
        pairs = ((x._indices(), x._values()) for x in (one.to_sparse(), other.to_sparse()))
        return all(map(_have_equal_values, *pairs))
    return one.shape == other.shape and (
        torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )


def _is_data(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_data, value))
    return isinstance(value, _PLAIN) or _entries_of(value) is not None


def _entries_of(value: Any) -> Any:
    """Return a container, or the dict of an object of a class of the user's; else None."""
    if type(value) in _CONTAINERS:
        return value
    own = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, Tensor))
    module = type(value).__module__
    if not own or callable(value) or module.startswith(("torch.", *_OWN)):
        return None
    return vars(value)


def _ids(entries: Any) -> Any:
    if isinstance(entries, dict):
        return [(key, id(value)) for key, value in entries.items()]
    ids = map(id, entries)
    return {*ids} if isinstance(entries, set) else [*ids]


class ModuleState:
    """A snapshot of the buffers and attributes of modules; see `Attributes`.

    Buffers, and tensors that are attributes, get their old values too.
    """

    def __init__(self, modules: Iterable[nn.Module], *, every: bool = False) -> None:
        modules = [*modules]
        self._attributes = Attributes(modules, every=every)
        self._tensors = [
            (held, name, tensor, tensor.detach().clone())
            for module in modules
            for held in (module._buffers, vars(module))
            for name, tensor in held.items()
            if isinstance(tensor, Tensor) and not tensor.is_meta
            if held is module._buffers
            or (tensor.layout is torch.strided and not tensor.requires_grad)
        ]

    def put_back(self) -> None:
        """Restore all buffers and attributes."""
        self._attributes.put_back()
        with torch.no_grad():
            for held, name, tensor, values in self._tensors:
                if not _have_equal_values(tensor, values):  # a write would break a later backward
                    tensor.copy_(values)
                held[name] = tensor


@contextmanager
def restored(model: nn.Module, *, every: bool = False) -> Iterator[None]:
    """Restore random generators, buffers and attributes after the block; see `Attributes`."""
    before, state = ModuleState(model.modules(), every=every), random.getstate()
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    try:
        with ExitStack() as forked:
            forked.enter_context(torch.random.fork_rng([]))
            for device in devices:
                forked.enter_context(torch.random.fork_rng([device], device_type=device.type))
            yield
    finally:
        random.setstate(state)
        before.put_back()


WIDTH = 1021  # number of sums that a tensor is folded into; a prime, so no shape aligns with it


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return a number, 0-d int64, that differs if the bits differ; certain for one changed element.

    Reads the tensor once, on its device. Several changes cancel only by chance, or if words of 8
    bytes swapped places at a distance that is a multiple of 1021.
    """
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    words = _words(dense.contiguous().view(-1))
    rows = len(words) // WIDTH
    whole, rest = words[: rows * WIDTH], words[rows * WIDTH :]
    weights = _weights(tensor.device)
    if rows:
        sums = whole.view(rows, WIDTH).sum(0)
        sums[: len(rest)] += rest
    else:
        sums, weights = rest, weights[: len(rest)]
    return (sums * weights).sum() + tensor.numel()


def digest_text(tensor: Tensor) -> str:
    """Return a tensor's digest as text; "none" for a meta tensor, which has no values."""
    return "none" if tensor.is_meta else f"{int(digest(tensor)) & 0xFFFFFFFFFFFFFFFF:016x}"


def _words(flat: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as 8-byte words, padded with zeros."""
    size = flat.element_size()
    if flat.numel() * size % 8:
        flat = nn.functional.pad(flat.view(torch.uint8), (0, -flat.numel() * size % 8))
    elif flat.storage_offset() * size % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers: no nonzero number times one of them is 0 modulo 2^64."""
    generator = torch.Generator().manual_seed(WIDTH)
    drawn = torch.randint(-(2**62), 2**62, (WIDTH,), generator=generator)
    return (drawn * 2 + 1).to(device)

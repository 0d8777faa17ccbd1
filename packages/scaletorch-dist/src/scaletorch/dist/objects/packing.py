"""Serialize objects: by pickle if allowed, else in the format of `torch.load(weights_only=True)`.

Ordinary tensors are sent by value: they arrive on the CPU, contiguous, each with its own memory.
"""

from __future__ import annotations

import datetime
import enum
import functools
import io
import os
import pathlib
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..errors import InvalidArgumentError
from ..wire.backend import as_bytes

VARIABLE = "SCALETORCH_ALLOW_PICKLE"

_YES = frozenset(("", "1", "true", "yes", "on"))
_WAY_OUT = (
    "send plain types instead (numbers, strings, lists, tuples, dicts, sets, tensors, numpy arrays)"
)
_PROTOCOL = 5  # fixed, so that ranks with different versions of Python can read each other
_SAVED = b"PK"  # first bytes of a `torch.save` file; no pickle begins with them


class Terms(NamedTuple):
    """Permission of a call to pickle objects."""

    allow_pickle: bool = True  # the call's argument; the environment may forbid pickle too
    forbidden: bool = False  # some rank of the group forbids it


_ALL = Terms()


def pickle_allowed(allow_pickle: bool) -> bool:
    """Return whether a call may pickle: its caller and the environment must both allow it."""
    return bool(allow_pickle) and os.environ.get(VARIABLE, "").strip().lower() in _YES


def refusal(who: str, allow_pickle: bool) -> str:
    """Return the error message for an object that needs pickle if pickle is forbidden."""
    switch = "allow_pickle=True" if not allow_pickle else f"{VARIABLE}=1"
    return (
        f"{who} is not plain, so that it would have to be pickled, which is switched off: "
        f"{_WAY_OUT}, or allow it with {switch} on every rank, where all ranks are trusted"
    )


def dump_object(data: Any, terms: Terms = _ALL) -> memoryview:
    """Serialize an object: by pickle if allowed, else as a plain object."""
    sink = io.BytesIO()  # its buffer can be sent without a copy
    plain = terms.forbidden or not pickle_allowed(terms.allow_pickle)
    try:
        if plain:
            torch.save(data, sink, pickle_module=_PLAIN_PICKLE)
        else:
            _Pickler(sink, _PROTOCOL).dump(data)
    except Exception as error:  # the object's own methods may raise anything
        message = f"{type(data).__name__} does not pickle: {type(error).__name__}: {error}"
        raise InvalidArgumentError(message) from error
    if plain:  # refuse here what no receiver could load
        sink.seek(0)
        with safe_globals([*_plain_types()]):
            names = sorted(get_unsafe_globals_in_checkpoint(sink))
        if names:
            raise InvalidArgumentError(refusal(", ".join(names), terms.allow_pickle))
    return sink.getbuffer()


def load_object(data: bytes | bytearray | memoryview, terms: Terms = _ALL) -> Any:
    """Load an object that `dump_object` serialized."""
    plain = bytes(data[: len(_SAVED)]) == _SAVED
    if not plain and not pickle_allowed(terms.allow_pickle):
        raise InvalidArgumentError(refusal("what arrived", terms.allow_pickle))
    try:
        if not plain:
            return pickle.loads(data)
        with safe_globals([*_plain_types()]):
            return torch.load(io.BytesIO(data), "cpu", weights_only=True)
    except Exception as error:  # the object's own methods may raise anything
        message = f"what arrived does not unpickle: {type(error).__name__}: {error}"
        raise InvalidArgumentError(message) from error


@functools.cache
def _plain_types() -> tuple[Callable[..., Any], ...]:
    """Return the plain types that `torch.load` does not allow by default."""
    found: list[Any] = [bytes, complex, frozenset, slice, range, type(pathlib.Path())]
    found += [datetime.date, datetime.datetime, datetime.timedelta]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found += [numpy.ndarray, numpy.dtype, numpy.empty(0).__reduce__()[0]]
        found += [numpy.float64(0).__reduce__()[0]]
        found += [type(numpy.dtype(kind)) for kind in "?bhilqBHILQefdgFDGSUmM"]
    return tuple(found)


class _PlainPickler(pickle.Pickler):
    """A pickler for `torch.save` that saves a tensor's values, not the rest of its storage."""

    def reducer_override(self, data: Any) -> Any:
        """Return an object's reduction; not called for built-in types."""
        if isinstance(data, enum.Enum):  # up to Python 3.11.4 it pickles getattr, not plain
            return type(data), (data.value,)
        return _compact(data).__reduce_ex__(2) if _is_ordinary(data) else NotImplemented


class _Pickler(pickle.Pickler):
    """A pickler that saves tensors of every dtype as bytes."""

    def reducer_override(self, data: Any) -> Any:
        """Return an object's reduction; not called for built-in types."""
        if not _is_ordinary(data):
            return NotImplemented
        values = _compact(data)
        content = bytearray(values.nbytes)
        if content:
            torch.frombuffer(content, dtype=torch.uint8).copy_(as_bytes(values.detach()))
        return _make_tensor, (content, data.dtype, tuple(data.shape), data.requires_grad)


# The attributes that `torch.save` uses of a pickle module.
_PLAIN_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_PlainPickler)


def _is_ordinary(data: Any) -> bool:
    if type(data) is not Tensor or data.layout is not torch.strided or vars(data):
        return False
    return not (data.is_quantized or data.is_meta)


def _compact(data: Tensor) -> Tensor:
    """Return the values as a contiguous CPU tensor that fills its storage."""
    values = data.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if values.untyped_storage().nbytes() != values.nbytes:
        values = values.clone()
    return values.requires_grad_(data.requires_grad)


def _make_tensor(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    if content:
        values = torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)
    else:
        values = torch.empty(shape, dtype=dtype)
    return values.requires_grad_(requires_grad)

"""Which types are plain, what their objects consist of, and how to make one again.

Builtin numbers, strings and containers have opcodes of their own in a pickle. An object of another
plain type travels as a call of `make` with the name of its kind and plain parts; the values of
tensors and arrays travel behind the pickle. `make` is the only name in such a pickle.

It takes damaged bytes for what they are: parts of other types or sizes are an error.
"""

from __future__ import annotations

import datetime
import enum
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arrays import (
    array_parts,
    make_array,
    make_number,
    make_size,
    make_tensor,
    number_parts,
    shape_of,
    tensor_parts,
)
from .beside_pickle import MalformedError, Named, NotPlainError, Received, Sent, check
from .named_types import make_record, member_parts, name_of, record_parts

BITS = 1024  # of the numbers of a range; more are not plain
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Kind(NamedTuple):
    """A plain type.

    Attributes:
        parts: An object and what is sent → what it is made from again.
        types: Exactly of which types the parts must be, Any for any plain one.
        make: What is received and the parts → the object.
    """

    parts: Callable[[Any, Sent], tuple[Any, ...]]
    types: tuple[Any, ...]
    make: Callable[..., Any]


def parts_of(data: Any, sent: Sent) -> tuple[Any, ...]:
    """Return the name of an object's kind, and its parts.

    Raises:
        NotPlainError: The object is not plain.
    """
    name = _KIND_OF.get(type(data)) or _further_kind(data, sent.named)
    return name, *_KINDS[name].parts(data, sent)


def _further_kind(data: Any, named: Named) -> str:
    kind, numpy = type(data), sys.modules.get("numpy")
    if named.get(name_of(kind)) is kind:
        return "member" if isinstance(data, enum.Enum) else "record"
    if numpy is not None and kind is numpy.ndarray:
        return "array"
    if numpy is not None and issubclass(kind, numpy.generic) and numpy.dtype(kind).type is kind:
        return "number"
    raise NotPlainError(name_of(kind))


def make(received: Received, name: Any, *parts: Any) -> Any:
    """Return an object of plain parts.

    Raises:
        MalformedError: Of such parts, `parts_of` makes nothing.
    """
    if type(name) is not str or name not in _KINDS:
        raise MalformedError("no kind of object")
    kind = _KINDS[name]
    if len(parts) != len(kind.types):
        raise MalformedError(f"another number of parts of a {name}")
    for part, right in zip(parts, kind.types, strict=True):
        check(right is Any or type(part) is right, f"part of a {name}")
        check(right is not int or part.bit_length() <= BITS, f"part of a {name}: too long")
    return kind.make(received, *parts)


def _range_parts(data: range, sent: Sent) -> tuple[int, ...]:
    bounds = data.start, data.stop, data.step
    if max(bound.bit_length() for bound in bounds) > BITS:
        raise NotPlainError(f"a range with numbers of more than {BITS} bits")
    return bounds


def _time_parts(data: datetime.datetime, sent: Sent) -> tuple[int, ...]:
    if data.tzinfo is not None:
        raise NotPlainError("a datetime with a time zone")
    return (*data.timetuple()[:6], data.microsecond, data.fold)


_PATH = type(pathlib.Path())  # of this system's kind
_KIND_OF: dict[type, str] = {
    Tensor: "tensor",
    torch.dtype: "dtype",
    torch.device: "device",
    torch.Size: "size",
    complex: "complex",
    slice: "slice",
    range: "range",
    _PATH: "path",
    datetime.date: "date",
    datetime.timedelta: "span",
    datetime.datetime: "time",
}
_KINDS = {
    "tensor": Kind(tensor_parts, (torch.dtype, tuple, bool), make_tensor),
    "array": Kind(array_parts, (str, tuple), make_array),
    "number": Kind(number_parts, (str, bytes), make_number),
    "dtype": Kind(lambda x, _: (str(x),), (str,), lambda _, name: DTYPES[name]),
    "device": Kind(lambda x, _: (str(x),), (str,), lambda _, name: torch.device(name)),
    "size": Kind(lambda x, _: (shape_of(x),), (tuple,), make_size),
    "complex": Kind(lambda x, _: (x.real, x.imag), (float, float), lambda _, *x: complex(*x)),
    "slice": Kind(lambda x, _: (x.start, x.stop, x.step), (Any,) * 3, lambda _, *x: slice(*x)),
    "range": Kind(_range_parts, (int,) * 3, lambda _, *x: range(*x)),
    "path": Kind(lambda x, _: (str(x),), (str,), lambda _, x: pathlib.Path(x)),
    "date": Kind(lambda x, _: (x.toordinal(),), (int,), lambda _, x: datetime.date.fromordinal(x)),
    "span": Kind(
        lambda x, _: (x.days, x.seconds, x.microseconds),
        (int,) * 3,
        lambda _, *x: datetime.timedelta(*x),
    ),
    "time": Kind(_time_parts, (int,) * 8, lambda _, *x: datetime.datetime(*x[:7], fold=x[7])),
    "member": Kind(member_parts, (str, str), lambda to, kind, x: to.named[kind].__members__[x]),
    "record": Kind(record_parts, (str, tuple), make_record),
}

"""A closed binary form of plain Python objects: what it does not know, it does not take.

Plain are None, bools, ints of any size, floats, complex numbers, strings, bytes and bytearrays,
lists, tuples, dicts, sets, frozen sets, slices, ranges, dates without a time zone, paths, tensors,
dtypes, devices and shapes, and numpy's arrays and numbers: of exactly these types, a subclass is
another.
Reading makes nothing else, calls nothing by a name it has read, and answers bytes that it did not
write with an error.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from . import arrays, containers, scalars
from .made import MADE
from .stream import MalformedError, NotPlainError, Read, Reader, Write, Writer

__all__ = ["MAGIC", "MalformedError", "NotPlainError", "decode", "encode"]

# A version, and the order of bytes in numbers: machines of both orders do not mix.
MAGIC = b"st1" + (b"<" if sys.byteorder == "little" else b">")

_ARRAYS, _NUMBERS = 14, 15
_KINDS: list[tuple[int, type | None, Write, Read]] = [
    (1, type(None), scalars.write_nones, scalars.read_nones),
    (2, bool, scalars.write_bools, scalars.read_bools),
    (3, int, scalars.write_ints, scalars.read_ints),
    (4, float, scalars.write_floats, scalars.read_floats),
    (5, complex, scalars.write_complexes, scalars.read_complexes),
    (6, str, scalars.write_texts, scalars.read_texts),
    (7, bytes, scalars.write_bytes, scalars.read_bytes),
    (8, bytearray, scalars.write_bytearrays, scalars.read_bytearrays),
    (9, list, containers.write_lists, containers.read_lists),
    (10, tuple, containers.write_tuples, containers.read_tuples),
    (11, set, containers.write_sets, containers.read_sets),
    (12, frozenset, containers.write_frozensets, containers.read_frozensets),
    (13, dict, containers.write_dicts, containers.read_dicts),
    (_ARRAYS, None, arrays.write_arrays, arrays.read_arrays),
    (_NUMBERS, None, arrays.write_numbers, arrays.read_numbers),
    (16, torch.Tensor, arrays.write_tensors, arrays.read_tensors),
    *((17 + place, made.type, made.write, made.read) for place, made in enumerate(MADE)),
]


class _Codes(dict[type, int]):
    """Type → code; numpy's types are looked up when they come, since numpy may not be there."""

    def __missing__(self, kind: type) -> int:
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is numpy.ndarray:
            return _ARRAYS
        if arrays.is_plain_number(kind):
            return _NUMBERS
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}")


_CODES = _Codes({kind: code for code, kind, _, _ in _KINDS if kind is not None})
_WRITES = {code: write for code, _, write, _ in _KINDS}
_READS = {code: read for code, _, _, read in _KINDS}


def encode(data: Any) -> bytearray:
    """Return the bytes of a plain object.

    Objects that come several times come back so within one level of containers. Of tensors the
    values travel, not memory that they share; they come back contiguous, on the CPU.

    Raises:
        NotPlainError: something in it is not plain; the message says what.
    """
    writer = Writer(_CODES, _WRITES)
    writer.data += MAGIC
    writer.items([data])
    return writer.data


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the object that `encode` was given.

    Args:
        data: its bytes; copied where they cannot be written to.

    Raises:
        MalformedError: they are not what `encode` wrote.
        ModuleNotFoundError: there are numpy's arrays in it, and no numpy here.
    """
    view = memoryview(data)
    reader = Reader(bytearray(view) if view.readonly else view, _READS)
    collects = gc.isenabled()
    gc.disable()  # it would search what is being made, again and again
    try:
        return _decode(reader)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # numbers too large, keys that do not hash, text that is none …
        message = f"these bytes hold no object: {type(error).__name__}: {error}"
        raise MalformedError(message) from error
    finally:
        if collects:
            gc.enable()


def _decode(reader: Reader) -> Any:
    if reader.take(len(MAGIC)) != MAGIC:
        raise MalformedError("no head")
    (made,) = reader.items(1)
    if reader.position != len(reader.data):
        raise MalformedError("more bytes than objects")
    return made

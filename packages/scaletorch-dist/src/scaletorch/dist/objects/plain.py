"""Plain objects as bytes: a pickle in which one name occurs, and the values of tensors.

    version and order of bytes (4) · length of the pickle (8) · pickle · values of tensors, arrays

Plain are None, bools, ints of any size, floats, complex numbers, strings, bytes and bytearrays,
lists, tuples, dicts, sets, frozen sets, slices, ranges, dates without a time zone, paths, tensors,
dtypes, devices and shapes, numpy's arrays and numbers, and dataclasses and enums that the caller
names: of exactly these types, a subclass is another.
"""

from __future__ import annotations

import gc
import io
import pickle
import struct
import sys
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from .arrays import bytes_of
from .beside_pickle import MalformedError, Named, NotPlainError, Received, Sent
from .plain_types import make, parts_of

# A version, and the order of bytes in numbers: machines of both orders do not mix.
MAGIC = b"st2" + (b"<" if sys.byteorder == "little" else b">")

NOTHING: Named = MappingProxyType({})

_PROTOCOL = 5  # of pickle: with a higher one, versions of Python could not read each other
_LENGTH = struct.Struct("<q")
_START = len(MAGIC) + _LENGTH.size


class _Writer(pickle.Pickler):
    """Pickles builtin types as pickle does, other plain ones as calls of `make`."""

    def __init__(self, sink: io.BytesIO, sent: Sent) -> None:
        super().__init__(sink, protocol=_PROTOCOL, buffer_callback=_refuse_buffer)
        self._sent = sent

    def reducer_override(self, data: Any) -> Any:
        """Return how to make an object again; not called for builtin types."""
        if data is make:
            return NotImplemented  # goes by its name
        return make, parts_of(data, self._sent)


def _refuse_buffer(data: Any) -> None:
    raise NotPlainError("pickle.PickleBuffer")


class _Source:
    """What an unpickler reads from: a buffer, of which it copies what it takes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        start, self.position = self.position, self.position + count
        return bytes(self._data[start : self.position])

    def readinto(self, target: memoryview) -> int:
        """Fill a buffer with the next bytes."""
        start, self.position = self.position, self.position + len(target)
        content = self._data[start : self.position]
        target[: len(content)] = content
        return len(content)

    def readline(self) -> bytes:
        """Refuse opcodes of text, which nobody writes."""
        raise MalformedError("a line of text")


class _Reader(pickle.Unpickler):
    """Python's unpickler, which finds nothing but `make`."""

    def __init__(self, source: _Source, received: Received) -> None:
        super().__init__(source)
        self._received = received

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the maker; the module is that of the sender's copy, so anything."""
        if name != make.__name__:
            raise MalformedError(f"the name {name!r:.200}, not the maker's")
        return partial(make, self._received)


def encode(data: Any, named: Named = NOTHING) -> memoryview:
    """Return the bytes of a plain object, which may be written to.

    Of tensors the values travel, not memory that they share; they come back contiguous, on the CPU.

    Args:
        data: The object.
        named: Dataclasses and enums that are plain too, of `named_types`.

    Raises:
        NotPlainError: Something in it is not plain; the message says what.
        RecursionError: Containers lie too deep in one another.
    """
    sink, sent = io.BytesIO(), Sent(named)
    sink.write(MAGIC + _LENGTH.pack(0))
    _Writer(sink, sent).dump(data)
    length = sink.tell() - _START
    for values in sent.values:
        sink.write(bytes_of(values))
    content = sink.getbuffer()
    _LENGTH.pack_into(content, len(MAGIC), length)
    return content


def decode(data: bytes | bytearray | memoryview, named: Named = NOTHING) -> Any:
    """Return the object that `encode` was given; no bytes make it call anything but `make`.

    Args:
        data: Its bytes; copied if they cannot be written to.
        named: Dataclasses and enums that are plain too, of `named_types`.

    Raises:
        MalformedError: They are not what `encode` wrote.
        ModuleNotFoundError: There are numpy's arrays in it, and no numpy here.
    """
    view = memoryview(bytearray(data) if memoryview(data).readonly else data)
    collects = gc.isenabled()
    gc.disable()  # it would search what is being made, again and again
    try:
        return _decode(view, named)
    except (ModuleNotFoundError, MalformedError):
        raise
    except Exception as error:  # numbers too large, keys that do not hash, text that is none …
        message = f"these bytes hold no object: {type(error).__name__}: {error}"
        raise MalformedError(message) from error
    finally:
        if collects:
            gc.enable()


def _decode(data: memoryview, named: Named) -> Any:
    if data[: len(MAGIC)] != MAGIC:
        raise MalformedError("no head")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if not 0 <= length <= len(data) - _START:
        raise MalformedError("cut short")
    content, received = data[_START : _START + length], Received(data[_START + length :], named)
    source = _Source(content)
    made = _Reader(source, received).load()
    if source.position != length:
        raise MalformedError("more bytes than objects")
    received.check_end()
    return made

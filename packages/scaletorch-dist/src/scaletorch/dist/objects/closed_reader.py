"""A reader of pickles that knows the opcodes of plain objects, and nothing else.

Python's own unpickler, however few names it may look up, hashes whatever a stream makes a key: a
few bytes can keep it busy for ever or overrun the stack. It also lets a stream set attributes of
what it has made. This reader has no opcodes for that, counts what hashing costs before it hashes,
and takes no memory for bytes that have not come. It takes up to a hundred times as long, and so
reads if pickle is forbidden; if it is allowed, nobody needs to hide an attack in plain objects.

Most pickles need no such care. One that consists of nothing but numbers, short strings, lists and
either tuples or dicts and sets, which a pattern can tell, has no tuples to hash: Python reads it.
"""

from __future__ import annotations

import pickle
import re
import struct
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from .beside_pickle import MalformedError, Received
from .hash_costs import Hashing
from .plain_types import make


@cache
def _many_numbers() -> re.Pattern[bytes]:
    """Return a pattern of numbers, None and bools alone, which Python reads 100 times as fast."""
    return re.compile(rb"(?:K.|G.{8}|M..|J.{4}|[N\x88\x89]){16,}+", re.DOTALL)


def _counted_by_a_byte(codes: bytes, most: int) -> bytes:
    lengths = (re.escape(bytes([count])) + b".{%d}" % count for count in range(most + 1))
    return b"[%b](?:%b)" % (codes, b"|".join(lengths))


@cache
def _safe() -> list[re.Pattern[bytes]]:
    """Return patterns of what Python may read; compiling them takes milliseconds, at first use."""
    harmless = rb"K.|J.{4}|G.{8}|h.|\x94|M..|[](aeN\x88\x89]|j.{4}|\x95.{8}|\x80.|"
    harmless += _counted_by_a_byte(b"\x8cC", 255)
    # Ints of up to seven bytes differ in their hashes; longer ones may be chosen not to.
    without_tuples = rb"[}us\x8f\x90]|" + _counted_by_a_byte(b"\x8a", 7)
    without_keys = rb"[)t\x85-\x87]|" + _counted_by_a_byte(b"\x8a", 255)
    return [
        re.compile(b"(?:%b|%b)*+\\." % (harmless, further), re.DOTALL)
        for further in (without_tuples, without_keys)
    ]


def read_closed(content: bytes, received: Received) -> Any:
    """Return the object of a pickle that anybody may have written.

    Args:
        content: The pickle.
        received: What makers need.

    Raises:
        Exception: of any type, if these bytes are not a plain object's.
    """
    if any(pattern.fullmatch(content) for pattern in _safe()):
        return pickle.loads(content)
    return ClosedReader(content, received).read()


class _Maker:
    """The one name in a pickle; gone when all is read."""

    __slots__ = ("__weakref__",)


class ClosedReader:
    """The stack of one pickle, its memo, and what its makers need.

    Attributes:
        stack: What has been made since the last mark, and waits for its container.
        memo: What may come again, by its number.
    """

    def __init__(self, content: bytes, received: Received) -> None:
        self._content = content
        self._position = 0
        self._received = received
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self._many_numbers = _many_numbers()
        self._hashing = Hashing()
        self._makers: list[weakref.ref[_Maker]] = []

    def read(self) -> Any:
        """Return the object; raise anything if there is none."""
        while (step := self._content[self._position]) != _STOP:
            self._position += 1
            _STEPS[step](self)
        (made,) = self.stack
        self.stack, self.memo = [], []
        if self._position + 1 != len(self._content):
            raise MalformedError("more bytes than objects")
        if self._marks or any(maker() is not None for maker in self._makers):
            raise MalformedError("a maker or a mark where an object should be")
        return made

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start, self._position = self._position, self._position + count
        if self._position > len(self._content):
            raise MalformedError("cut short")
        return self._content[start : self._position]

    def mark(self) -> None:
        """Begin the contents of a container."""
        self._marks.append(self.stack)
        self.stack = []
        if numbers := self._many_numbers.match(self._content, self._position):
            self._position = numbers.end()
            self.stack += pickle.loads(b"".join((b"\x80\5(", numbers[0], b"l.")))

    def since_mark(self) -> list[Any]:
        """Return the contents of a container, and go on with what was before."""
        found, self.stack = self.stack, self._marks.pop()
        return found

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        """Take the last values from the stack."""
        if len(self.stack) < count:
            raise MalformedError("more is used than there is")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def extend(self, entries: list[Any]) -> None:
        """Append to the list on the stack."""
        self._last(list).extend(entries)

    def update(self, pairs: list[Any]) -> None:
        """Put keys and values, in turns, into the dict on the stack."""
        keys, into = pairs[::2], self._last(dict)
        self._hashing.spend(keys, into)
        into.update(zip(keys, pairs[1::2], strict=True))

    def add(self) -> None:
        """Add to the set on the stack."""
        found = self.since_mark()
        into = self._last(set)
        self._hashing.spend(found, into)
        into.update(found)

    def frozen(self) -> None:
        """Make a frozen set."""
        found = self.since_mark()
        self._hashing.spend(found, ())
        self.push(frozenset(found))

    def _last(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise MalformedError(f"no {kind.__name__} to put entries into")
        return self.stack[-1]

    def name(self) -> None:
        """Put the maker on the stack; the module is that of the sender's copy, so anything."""
        _, name = self.pop(2)
        if type(name) is not str or name != make.__name__:
            raise MalformedError("another name than the maker's")
        maker = _Maker()
        self._makers.append(weakref.ref(maker))
        self.push(maker)

    def call(self) -> None:
        """Make an object of its parts."""
        maker, parts = self.pop(2)
        if type(maker) is not _Maker or type(parts) is not tuple:
            raise MalformedError("a call of what is not the maker")
        self.push(make(self._received, *parts))


Step = Callable[[ClosedReader], object]


def _number(form: str, then: Callable[[ClosedReader, Any], None] = ClosedReader.push) -> Step:
    """Return a step that reads a number, and does something with it."""
    unpack, size = struct.Struct(form).unpack, struct.calcsize(form)
    return lambda reader: then(reader, *unpack(reader.take(size)))


def _counted(form: str, kind: Callable[[bytes], Any]) -> Step:
    """Return a step that reads a length, and as many bytes."""
    return _number(form, lambda reader, length: reader.push(kind(reader.take(length))))


def _noted(form: str) -> Step:
    """Return a step that reads the number of what comes again."""
    return _number(form, lambda reader, place: reader.push(reader.memo[place]))


def _tuple_of(count: int) -> Step:
    return lambda reader: reader.push(tuple(reader.pop(count)))


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _long(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


_STOP = ord(".")
_STEPS: dict[int, Step] = {
    code[0]: step
    for code, step in {
        pickle.PROTO: lambda reader: reader.take(1),
        pickle.FRAME: lambda reader: reader.take(8),
        pickle.NONE: lambda reader: reader.push(None),
        pickle.NEWTRUE: lambda reader: reader.push(True),
        pickle.NEWFALSE: lambda reader: reader.push(False),
        pickle.BININT1: _number("<B"),
        pickle.BININT2: _number("<H"),
        pickle.BININT: _number("<i"),
        pickle.BINFLOAT: _number(">d"),
        pickle.LONG1: _counted("<B", _long),
        pickle.LONG4: _counted("<I", _long),
        pickle.SHORT_BINUNICODE: _counted("<B", _text),
        pickle.BINUNICODE: _counted("<I", _text),
        pickle.BINUNICODE8: _counted("<Q", _text),
        pickle.SHORT_BINBYTES: _counted("<B", bytes),
        pickle.BINBYTES: _counted("<I", bytes),
        pickle.BINBYTES8: _counted("<Q", bytes),
        pickle.BYTEARRAY8: _counted("<Q", bytearray),
        pickle.EMPTY_LIST: lambda reader: reader.push([]),
        pickle.EMPTY_TUPLE: lambda reader: reader.push(()),
        pickle.EMPTY_DICT: lambda reader: reader.push({}),
        pickle.EMPTY_SET: lambda reader: reader.push(set()),
        pickle.MARK: ClosedReader.mark,
        pickle.TUPLE: lambda reader: reader.push(tuple(reader.since_mark())),
        pickle.TUPLE1: _tuple_of(1),
        pickle.TUPLE2: _tuple_of(2),
        pickle.TUPLE3: _tuple_of(3),
        pickle.APPEND: lambda reader: reader.extend(reader.pop(1)),
        pickle.APPENDS: lambda reader: reader.extend(reader.since_mark()),
        pickle.SETITEM: lambda reader: reader.update(reader.pop(2)),
        pickle.SETITEMS: lambda reader: reader.update(reader.since_mark()),
        pickle.ADDITEMS: ClosedReader.add,
        pickle.FROZENSET: ClosedReader.frozen,
        pickle.POP: lambda reader: reader.pop(1),
        pickle.POP_MARK: ClosedReader.since_mark,
        pickle.MEMOIZE: lambda reader: reader.memo.append(reader.stack[-1]),
        pickle.BINGET: _noted("<B"),
        pickle.LONG_BINGET: _noted("<I"),
        pickle.STACK_GLOBAL: ClosedReader.name,
        pickle.REDUCE: ClosedReader.call,
    }.items()
}

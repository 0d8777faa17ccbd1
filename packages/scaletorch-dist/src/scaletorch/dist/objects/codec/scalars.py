"""Numbers and strings, packed in arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

from .stream import MalformedError, Read, Reader, Write, Writer

_SAMPLE = 1000  # strings that are looked at for repetitions
_SHORT = 1024  # bytes on average, up to which all are read at once and then cut
_LONG = 64  # characters on average, from which all are


def write_nones(out: Writer, items: list[None]) -> None:
    """Write a byte for each, so that no count is larger than the bytes behind it."""
    out.data += bytes(len(items))


def read_nones(data: Reader, count: int) -> list[None]:
    """Read what `write_nones` wrote."""
    data.take(count)
    return [None] * count


def write_bools(out: Writer, items: list[bool]) -> None:
    """Write a byte for each."""
    out.data += bytes(items)


def read_bools(data: Reader, count: int) -> list[bool]:
    """Read what `write_bools` wrote."""
    flags: Any = data.take(count).cast("?")  # a byte that is neither 0 nor 1 is True
    values: list[bool] = flags.tolist()
    return values


def write_ints(out: Writer, items: list[int]) -> None:
    """Write one or eight bytes for each, or where that is not enough, as many as they need."""
    start = len(out.data)
    out.data.append(0)
    try:
        out.numbers(items)
    except struct.error:
        out.data[start] = 1
        write_distinct(out, items, _write_long_ints)


def read_ints(data: Reader, count: int) -> list[int]:
    """Read what `write_ints` wrote."""
    (long,) = data.take(1)
    return read_distinct(data, count, _read_long_ints) if long else data.numbers(count)


def _write_long_ints(out: Writer, items: list[int]) -> None:
    sizes = [(item.bit_length() + 8) // 8 for item in items]
    out.numbers(sizes)
    for item, size in zip(items, sizes, strict=True):
        out.data += item.to_bytes(size, "little", signed=True)


def _read_long_ints(data: Reader, count: int) -> list[int]:
    sizes = data.lengths(count)
    return [int.from_bytes(data.take(size), "little", signed=True) for size in sizes]


def write_floats(out: Writer, items: list[float]) -> None:
    """Write eight bytes for each."""
    out.data += struct.pack(f"{len(items)}d", *items)


def read_floats(data: Reader, count: int) -> list[float]:
    """Read what `write_floats` wrote."""
    return data.take(8 * count).cast("d").tolist()  # type: ignore[return-value]  # as of bytes


def write_complexes(out: Writer, items: list[complex]) -> None:
    """Write real and imaginary parts."""
    write_floats(out, list(chain.from_iterable((item.real, item.imag) for item in items)))


def read_complexes(data: Reader, count: int) -> list[complex]:
    """Read what `write_complexes` wrote."""
    parts = read_floats(data, 2 * count)
    return list(map(complex, parts[::2], parts[1::2]))


def write_texts(out: Writer, items: list[str]) -> None:
    """Write all texts in one, with zeros between them, or their lengths where they hold zeros."""
    _write_repeated(out, items, _write_texts)


def read_texts(data: Reader, count: int) -> list[str]:
    """Read what `write_texts` wrote."""
    return read_distinct(data, count, _read_texts)


def _write_texts(out: Writer, items: list[str]) -> None:
    joined = "\0".join(items)
    separated = joined.count("\0") == len(items) - 1
    out.data.append(separated)
    if not separated:
        out.numbers(map(len, items))
        joined = "".join(items)
    packed = joined.encode("utf-8", "surrogatepass")
    out.number(len(packed))
    out.data += packed


def _read_texts(data: Reader, count: int) -> list[str]:
    (separated,) = data.take(1)
    lengths = [] if separated else data.lengths(count)
    joined = str(data.take(data.length()), "utf-8", "surrogatepass")
    texts = joined.split("\0") if separated else pieces(joined, lengths)
    if len(texts) != count:
        raise MalformedError("another number of texts")
    return texts


def write_bytes(out: Writer, items: list[bytes]) -> None:
    """Write lengths and contents."""
    _write_repeated(out, items, _write_bytes)


def read_bytes(data: Reader, count: int) -> list[bytes]:
    """Read what `write_bytes` wrote."""
    return read_distinct(data, count, _read_bytes)


def write_bytearrays(out: Writer, items: list[bytearray]) -> None:
    """Write lengths and contents."""
    write_distinct(out, items, _write_bytes, mutable=True)


def read_bytearrays(data: Reader, count: int) -> list[bytearray]:
    """Read what `write_bytearrays` wrote."""
    return read_distinct(data, count, _read_bytearrays)


def _write_bytes(out: Writer, items: Sequence[bytes | bytearray]) -> None:
    out.numbers(map(len, items))
    if sum(map(len, items)) <= _SHORT * len(items):
        out.data += b"".join(items)
        return
    for item in items:
        out.data += item


def _read_bytes(data: Reader, count: int) -> list[bytes]:
    lengths = data.lengths(count)
    if sum(lengths) <= _SHORT * count:
        return pieces(bytes(data.take(sum(lengths))), lengths)
    return [bytes(data.take(length)) for length in lengths]


def _read_bytearrays(data: Reader, count: int) -> list[bytearray]:
    return [bytearray(data.take(length)) for length in data.lengths(count)]


def pieces(whole: Any, lengths: list[int]) -> list[Any]:
    """Cut a sequence into slices of these lengths, which take all of it."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(whole):
        raise MalformedError("lengths that do not add up")
    return [whole[start:end] for start, end in pairwise(ends)]


def _write_repeated(out: Writer, items: list[Any], write: Write) -> None:
    """Write strings: repeated ones once, where the first show that this saves anything."""
    first = items[:_SAMPLE]
    few = 2 * len(set(map(id, first))) <= len(first)
    if len(items) == 1 or not (few or sum(map(len, items)) > _LONG * len(items)):
        out.data.append(0)
        write(out, items)
        return
    distinct = dict.fromkeys(items)
    out.data.append(1)
    out.number(len(distinct))
    write(out, list(distinct))
    places = dict(zip(distinct, range(len(distinct)), strict=True))
    out.numbers(map(places.__getitem__, items))


def write_distinct(out: Writer, items: list[Any], write: Write, mutable: bool = False) -> None:
    """Write items; an object that comes several times among them is written once.

    Args:
        out: where to.
        items: of one kind.
        write: writes the distinct ones.
        mutable: refuse what has come before, elsewhere: it would come back as two objects.
    """
    places = set(map(id, items))
    if mutable:
        out.own(places, items)
    if len(places) == len(items):
        out.data.append(0)
        write(out, items)
        return
    distinct = dict(zip(map(id, items), items, strict=True))
    out.data.append(1)
    out.number(len(distinct))
    write(out, list(distinct.values()))
    order = dict(zip(distinct, range(len(distinct)), strict=True))
    out.numbers(map(order.__getitem__, map(id, items)))


def read_distinct(data: Reader, count: int, read: Read) -> list[Any]:
    """Read what `write_distinct` wrote."""
    (repeated,) = data.take(1)
    if not repeated:
        return read(data, count)
    distinct = read(data, data.length())
    return list(map(distinct.__getitem__, data.lengths(count)))

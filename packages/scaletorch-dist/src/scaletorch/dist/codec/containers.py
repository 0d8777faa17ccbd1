"""Containers: how long each is, and what is in all of them as one list."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

from .scalars import pieces, read_distinct, write_distinct
from .stream import MalformedError, Reader, Writer


def write_contents(out: Writer, items: list[Any]) -> None:
    """Write what iterating over each gives."""
    out.numbers(map(len, items))
    out.items(list(chain.from_iterable(items)))


def read_contents(data: Reader, count: int) -> list[list[Any]]:
    """Read what `write_contents` wrote, as lists."""
    lengths = data.lengths(count)
    return pieces(data.items(sum(lengths)), lengths)


def write_mutable(out: Writer, items: list[Any]) -> None:
    """Write lists or sets."""
    write_distinct(out, items, write_contents, mutable=True)


def write_immutable(out: Writer, items: list[Any]) -> None:
    """Write tuples or frozen sets."""
    write_distinct(out, items, write_contents)


def read_lists(data: Reader, count: int) -> list[list[Any]]:
    """Read lists that `write_mutable` wrote."""
    return read_distinct(data, count, read_contents)


def read_tuples(data: Reader, count: int) -> list[tuple[Any, ...]]:
    """Read tuples that `write_immutable` wrote."""
    return read_distinct(data, count, _read_tuples)


def _read_tuples(data: Reader, count: int) -> list[tuple[Any, ...]]:
    lengths = data.lengths(count)
    contents = data.items(sum(lengths))
    if count > 1 and lengths.count(lengths[0]) == count and lengths[0]:
        return list(zip(*[iter(contents)] * lengths[0], strict=True))
    return list(map(tuple, pieces(contents, lengths)))


def read_sets(data: Reader, count: int) -> list[set[Any]]:
    """Read sets that `write_mutable` wrote."""
    return read_distinct(data, count, _read_sets)


def _read_sets(data: Reader, count: int) -> list[set[Any]]:
    return [_as_set(set, content) for content in read_contents(data, count)]


def read_frozensets(data: Reader, count: int) -> list[frozenset[Any]]:
    """Read frozen sets that `write_immutable` wrote."""
    return read_distinct(data, count, _read_frozensets)


def _read_frozensets(data: Reader, count: int) -> list[frozenset[Any]]:
    return [_as_set(frozenset, content) for content in read_contents(data, count)]


def _as_set(kind: Any, content: list[Any]) -> Any:
    made = kind(content)
    if len(made) != len(content):
        raise MalformedError("a set with an entry twice")
    return made


def write_dicts(out: Writer, items: list[dict[Any, Any]]) -> None:
    """Write dicts; where all have the same strings for keys, these once."""
    write_distinct(out, items, _write_dicts, mutable=True)


def read_dicts(data: Reader, count: int) -> list[dict[Any, Any]]:
    """Read what `write_dicts` wrote."""
    return read_distinct(data, count, _read_dicts)


def _write_dicts(out: Writer, items: list[dict[Any, Any]]) -> None:
    alike = len(items) > 1 and _alike(items)
    out.data.append(alike)
    if alike:
        out.number(len(items[0]))
        out.items(list(items[0]))
    else:
        out.numbers(map(len, items))
        out.items(list(chain.from_iterable(items)))
    out.items(list(chain.from_iterable(map(dict.values, items))))


def _alike(items: list[dict[Any, Any]]) -> bool:
    first = tuple(items[0])
    return (
        len(first) > 0
        and set(map(len, items)) == {len(first)}
        and set(map(type, chain.from_iterable(items))) == {str}
        and all(map(first.__eq__, map(tuple, items)))
    )


def _read_dicts(data: Reader, count: int) -> list[dict[Any, Any]]:
    (alike,) = data.take(1)
    if alike:
        size = data.length()
        keys, values = data.items(size), data.items(size * count)
        if len(set(keys)) != size or not size:
            raise MalformedError("a dict with a key twice")
        rows = zip(*[iter(values)] * size, strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]
    lengths = data.lengths(count)
    total = sum(lengths)
    all_keys, all_values = data.items(total), data.items(total)
    pairs = zip(all_keys, all_values, strict=True)
    made = [dict(islice(pairs, length)) for length in lengths]
    if sum(map(len, made)) != total:
        raise MalformedError("a dict with a key twice")
    return made

"""Containers: how long each is, and what is in all of them as one list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from .scalars import pieces, read_distinct, write_distinct
from .stream import MalformedError, Reader, Writer

_SINGLE = frozenset((type(None), bool, int, float, complex, str, bytes))


def write_contents(out: Writer, items: list[Any]) -> None:
    """Write what iterating over each gives."""
    lengths = list(map(len, items))
    rows = len(items) > 1 and lengths[0] > 0 and lengths.count(lengths[0]) == len(items)
    out.data.append(rows)
    flat = list(chain.from_iterable(items))
    if rows:
        out.number(lengths[0])
        _write_rows(out, flat, lengths[0])
    else:
        out.numbers(lengths)
        out.items(flat)


def read_contents(data: Reader, count: int, make: Callable[[Any], Any]) -> list[Any]:
    """Read what `write_contents` wrote, each as what `make` makes of a list or tuple."""
    (rows,) = data.take(1)
    if rows:
        return list(map(make, _read_rows(data, data.length(), count)))
    lengths = data.lengths(count)
    return list(map(make, pieces(data.items(sum(lengths)), lengths)))


def _write_rows(out: Writer, flat: list[Any], width: int) -> None:
    """Write rows of one width: numbers and strings of several types by column, else as they are.

    What lies in one column is mostly of one type; containers stay on one level all the same, so
    that one which comes twice is known.
    """
    kinds = set(map(type, flat))
    by_column = len(kinds) > 1 and kinds <= _SINGLE
    out.data.append(by_column)
    for part in [flat[start::width] for start in range(width)] if by_column else [flat]:
        out.items(part)


def _read_rows(data: Reader, width: int, count: int) -> Iterator[tuple[Any, ...]]:
    if not width:
        raise MalformedError("rows of nothing")
    (by_column,) = data.take(1)
    if by_column:
        return zip(*[data.items(count) for _ in range(width)], strict=True)
    flat = data.items(width * count)  # there are as many bytes as entries at least
    return zip(*[iter(flat)] * width, strict=True)


def write_lists(out: Writer, items: list[Any]) -> None:
    """Write lists."""
    write_distinct(out, items, write_contents, mutable=True)


def write_tuples(out: Writer, items: list[Any]) -> None:
    """Write tuples."""
    write_distinct(out, items, write_contents)


def write_sets(out: Writer, items: list[Any]) -> None:
    """Write sets."""
    write_distinct(out, items, _write_sets, mutable=True)


def write_frozensets(out: Writer, items: list[Any]) -> None:
    """Write frozen sets."""
    write_distinct(out, items, _write_sets)


def _write_sets(out: Writer, items: list[Any]) -> None:
    for each in items:
        out.hashing.spend(each)
    write_contents(out, items)


def read_lists(data: Reader, count: int) -> list[list[Any]]:
    """Read lists that `write_lists` wrote."""
    return read_distinct(data, count, partial(read_contents, make=list))


def read_tuples(data: Reader, count: int) -> list[tuple[Any, ...]]:
    """Read tuples that `write_tuples` wrote."""
    return read_distinct(data, count, partial(read_contents, make=tuple))


def read_sets(data: Reader, count: int) -> list[set[Any]]:
    """Read sets that `write_sets` wrote."""
    return read_distinct(data, count, partial(_read_sets, set))


def read_frozensets(data: Reader, count: int) -> list[frozenset[Any]]:
    """Read frozen sets that `write_frozensets` wrote."""
    return read_distinct(data, count, partial(_read_sets, frozenset))


def _read_sets(kind: Any, data: Reader, count: int) -> list[Any]:
    def make(content: Any) -> Any:
        data.hashing.spend(content)
        made = kind(content)
        if len(made) != len(content):
            raise MalformedError("a set with an entry twice")
        return made

    return read_contents(data, count, make)


def write_dicts(out: Writer, items: list[dict[Any, Any]]) -> None:
    """Write dicts; where all have the same strings for keys, these once."""
    write_distinct(out, items, _write_dicts, mutable=True)


def read_dicts(data: Reader, count: int) -> list[dict[Any, Any]]:
    """Read what `write_dicts` wrote."""
    return read_distinct(data, count, _read_dicts)


def _write_dicts(out: Writer, items: list[dict[Any, Any]]) -> None:
    keys = list(chain.from_iterable(items))
    _count_keys(out, keys, items)
    values = list(chain.from_iterable(map(dict.values, items)))
    alike = len(items) > 1 and _alike(items, keys)
    out.data.append(alike)
    if alike:
        width = len(items[0])
        out.number(width)
        out.items(keys[:width])
        _write_rows(out, values, width)
    else:
        out.numbers(map(len, items))
        out.items(keys)
        out.items(values)


def _count_keys(stream: Reader | Writer, keys: list[Any], of: Iterable[Collection[Any]]) -> None:
    """Count what hashing the keys of dicts costs, which is looked at for strings at once."""
    if set(map(type, keys)) != {str}:
        for each in of:
            stream.hashing.spend(each)


def _alike(items: list[dict[Any, Any]], keys: list[Any]) -> bool:
    """Tell whether all dicts have the same strings for keys, in one order.

    No dict is longer than the first, where all keys together repeat the first ones, since it would
    have one of them twice; so none is shorter either.
    """
    width = len(items[0])
    return (
        width > 0
        and len(keys) == width * len(items)
        and keys == keys[:width] * len(items)
        and set(map(type, keys)) == {str}
    )


def _read_dicts(data: Reader, count: int) -> list[dict[Any, Any]]:
    (alike,) = data.take(1)
    if alike:
        size = data.length()
        keys = data.items(size)
        data.hashing.spend(keys)
        if len(set(keys)) != size:
            raise MalformedError("a dict with a key twice")
        return list(map(dict, map(zip, repeat(keys), _read_rows(data, size, count))))
    lengths = data.lengths(count)
    total = sum(lengths)
    all_keys, all_values = data.items(total), data.items(total)
    _count_keys(data, all_keys, pieces(all_keys, lengths))
    pairs = zip(all_keys, all_values, strict=True)
    made = [dict(islice(pairs, length)) for length in lengths]
    if sum(map(len, made)) != total:
        raise MalformedError("a dict with a key twice")
    return made

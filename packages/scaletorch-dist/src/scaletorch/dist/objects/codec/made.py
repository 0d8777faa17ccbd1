"""Types whose objects are made from a few plain values: slices, sizes, dtypes, dates, paths."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .containers import read_contents, write_contents
from .scalars import read_distinct, write_distinct
from .stream import NotPlainError, Reader, Writer

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Made(NamedTuple):
    """A type, what its objects consist of, and how to make one again."""

    type: type
    parts: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]

    def write(self, out: Writer, items: list[Any]) -> None:
        """Write the parts of each."""
        write_distinct(out, items, self._write)

    def read(self, data: Reader, count: int) -> list[Any]:
        """Read what `write` wrote."""
        return read_distinct(data, count, self._read)

    def _write(self, out: Writer, items: list[Any]) -> None:
        write_contents(out, list(map(self.parts, items)))

    def _read(self, data: Reader, count: int) -> list[Any]:
        return read_contents(data, count, lambda content: self.make(*content))


def _bounds(x: Any) -> tuple[Any, ...]:
    return x.start, x.stop, x.step


def _dtype_name(dtype: torch.dtype) -> tuple[str]:
    return (str(dtype),)


def _place(device: torch.device) -> tuple[str]:
    return (str(device),)


def _size(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


def _day(date: datetime.date) -> tuple[int]:
    return (date.toordinal(),)


def _span(span: datetime.timedelta) -> tuple[int, ...]:
    return span.days, span.seconds, span.microseconds


def _time(time: datetime.datetime) -> tuple[Any, ...]:
    if time.tzinfo is not None:
        raise NotPlainError("a datetime with a time zone")
    return (*time.timetuple()[:6], time.microsecond, time.fold)


def _text(path: pathlib.PurePath) -> tuple[str]:
    return (str(path),)


def _make_time(*parts: int) -> datetime.datetime:
    *parts_without_fold, fold = parts
    return datetime.datetime(*parts_without_fold, fold=fold)  # type: ignore[arg-type]


MADE = (
    Made(slice, _bounds, slice),
    Made(range, _bounds, range),
    Made(torch.Size, tuple, _size),
    Made(torch.dtype, _dtype_name, DTYPES.__getitem__),
    Made(torch.device, _place, torch.device),
    Made(datetime.date, _day, datetime.date.fromordinal),
    Made(datetime.timedelta, _span, datetime.timedelta),
    Made(datetime.datetime, _time, _make_time),
    Made(type(pathlib.Path()), _text, pathlib.Path),  # of this system's kind
)

"""Numbers with units: parse a size such as "80GiB", and format with few digits."""

from __future__ import annotations

import re

from ..dist.errors import InvalidArgumentError

_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}  # fmt: skip


def bytes_in(given: str) -> int:
    """Return the bytes of a size.

    Args:
        given: A number with a unit, such as "80GiB" or "1.5 GB"; without one, of bytes.

    Raises:
        InvalidArgumentError: It is no number above 0, or its unit is unknown.

    Example:
        >>> bytes_in("80GiB") == 80 * 2**30
        True
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(\w*)\s*", given)
    if found is None or float(found[1]) <= 0 or found[2] not in ("", *_SIZES):
        known = ", ".join(_SIZES)
        raise InvalidArgumentError(
            f"a size must be a number above 0 with a unit of {known}, got {given!r}"
        )
    return int(float(found[1]) * _SIZES.get(found[2], 1.0))


def in_bytes(size: float) -> str:
    """Return bytes in a suitable unit."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{_three(size / 2**power)} {unit}"
    return f"{size:.0f} B"


def in_seconds(seconds: float) -> str:
    """Return a time in a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def in_short(count: float) -> str:
    """Return a large number in at most five characters, such as 1.23M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"


def _three(number: float) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"

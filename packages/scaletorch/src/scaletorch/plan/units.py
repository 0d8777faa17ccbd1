"""Numbers with units: parse text such as "80GiB" or "3us", and format with few digits."""

from __future__ import annotations

import math
import re

from ..dist.errors import InvalidArgumentError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZES = {**_DECIMAL, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
BYTES = {f"{prefix}B": factor for prefix, factor in _SIZES.items()}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES_A_SECOND = {
    **{f"{prefix}B/s": factor for prefix, factor in _SIZES.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}


def quantity(given: str, units: dict[str, float], name: str) -> float:
    """Parse a number with a unit; a number without one is in the base unit.

    Args:
        given: Text such as "80GiB".
        units: Factor of each unit: `BYTES`, `SECONDS` or `BYTES_A_SECOND`.
        name: Name of the quantity, for error messages.

    Raises:
        InvalidArgumentError: The number is not above 0, or the unit is unknown.

    Example:
        >>> quantity("20us", SECONDS, "latency")
        2e-05
    """
    known = ", ".join(sorted(units, key=lambda unit: (len(unit), unit)))
    found = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*(\S*)\s*", given)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if found is None or not 0 < number < math.inf:
        raise InvalidArgumentError(
            f"{name} must be a number above 0 with a unit of {known}, got {given!r}"
        )
    if found[2] and found[2] not in units:
        raise InvalidArgumentError(
            f"{name} {given!r} has the unknown unit {found[2]!r}: it may be {known}"
        )
    return number * units.get(found[2], 1.0)


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

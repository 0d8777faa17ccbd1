"""Numbers with units, as people write them: "80GiB", "312TFLOP/s", "20us", "50GB/s"."""

from __future__ import annotations

import math
import re

from ...dist.errors import InvalidArgumentError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SIZES = {**_DECIMAL, **_BINARY}
BYTES = {f"{prefix}B": factor for prefix, factor in _SIZES.items()}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES_A_SECOND = {
    **{f"{prefix}B/s": factor for prefix, factor in _SIZES.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}
FLOPS = {
    f"{prefix}{unit}": factor
    for prefix, factor in _DECIMAL.items()
    for unit in ("FLOP/s", "FLOPS", "FLOPs")
}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def quantity(given: object, units: dict[str, float], name: str, *, least: float = 0.0) -> float:
    """Read a number with a unit; a bare number is of the plain one.

    Args:
        given: A number, or text such as "80GiB".
        units: How many of the plain unit each is: `BYTES`, `SECONDS`, `BYTES_A_SECOND`, `FLOPS`.
        name: Of the quantity, for messages.
        least: It must be more than this, or as much if this is 0 seconds.

    Raises:
        InvalidArgumentError: No number, an unknown unit, or too small a number.

    Example:
        >>> quantity("20us", SECONDS, "latency")
        2e-05
    """
    known = ", ".join(sorted(units, key=lambda unit: (len(unit), unit)))
    if isinstance(given, str):
        found = _NUMBER.fullmatch(given)
        if found is None:
            raise InvalidArgumentError(
                f"{name} must be a number with a unit of {known}, got {given!r}"
            )
        number, unit = float(found[1]), found[2]
        if unit and unit not in units:
            raise InvalidArgumentError(
                f"{name} {given!r} has the unknown unit {unit!r}: it may be {known}"
            )
        number *= units[unit] if unit else 1.0
    elif isinstance(given, int | float) and not isinstance(given, bool):
        number = float(given)
    else:
        raise InvalidArgumentError(f"{name} must be a number with a unit of {known}, got {given!r}")
    if not math.isfinite(number) or number < least or (number == 0 and units is not SECONDS):
        raise InvalidArgumentError(f"{name} must be finite and above {least:g}, got {given!r}")
    return number

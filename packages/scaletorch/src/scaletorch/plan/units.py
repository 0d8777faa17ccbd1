"""How the numbers of a plan are said: in few digits, with a unit."""

from __future__ import annotations


def in_bytes(size: float) -> str:
    """Return bytes with a unit that suits them."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{_three(size / 2**power)} {unit}"
    return f"{size:.0f} B"


def in_seconds(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def in_short(count: float) -> str:
    """Return a large number in at most five letters, as 1.23M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"


def _three(number: float) -> str:
    """Return three digits, or all in front of the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"

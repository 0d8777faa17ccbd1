"""The line of the user's program that made a call."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from zlib import crc32

_PACKAGE = __name__.rpartition(".dist.")[0] + "."  # this library, also where it is vendored
_SKIPPED = (_PACKAGE, "torch.", "contextlib", "functools")

# By identity: to hash code takes a microsecond. The code is kept, so that no other gets its place.
_inside: dict[int, tuple[bool, CodeType]] = {}
_sites: dict[tuple[int, int], tuple[bytes, int]] = {}


def call_site() -> tuple[bytes, int]:
    """Return the first frame outside this library and torch, and a checksum of it.

    Returns:
        ``file.py:33 in function``, cut where it is long.
    """
    frame: FrameType = sys._getframe(3)  # beyond the recorder
    while True:
        code = frame.f_code
        known = _inside.get(id(code))
        if known is None:
            name = frame.f_globals.get("__name__", "")
            known = _inside[id(code)] = name.startswith(_SKIPPED), code
        outer = frame.f_back
        if not known[0] or outer is None:
            break
        frame = outer
    key = id(code), frame.f_lasti
    site = _sites.get(key)
    if site is None:
        file = "/".join(code.co_filename.rsplit("/", 2)[-2:])[-40:]
        text = f"{file}:{frame.f_lineno} in {code.co_name}".encode()[:72]
        site = _sites[key] = text, crc32(text)
    return site

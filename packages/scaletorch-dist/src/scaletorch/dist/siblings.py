"""Wheels of this project refuse siblings of another series, which pip lets in.

`pip install --upgrade scaletorch-pg` puts a new series beside a wheel that needs the old one: pip
prints a line about it and ends well. So each wheel compares versions when it is imported. A
vendored copy does the same, as versions are read from the copies and not from what is installed.
Released wheels call this of whatever `scaletorch-dist` is there: its name and arguments stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import VersionMismatchError


def require_siblings(wheel: str, version: str, found: Mapping[str, str]) -> None:
    """Raise unless all siblings fit.

    Args:
        wheel: The name of the wheel that needs them.
        version: Its own version.
        found: For each pin of the wheel's metadata, such as `scaletorch-pg~=0.1.0`, the version
            that is there.

    Raises:
        VersionMismatchError: A sibling is older than its pin, or of another series.
    """
    for pin, there in found.items():
        sibling, _, wanted = pin.partition("~=")
        if not compatible(there, wanted):
            raise VersionMismatchError(
                f"{wheel} {version} works with {pin}, and {sibling} {there} is beside it. "
                f"`pip install {wheel}=={version}`, or a newer one, brings siblings that fit; "
                "copies in another project are to be updated together."
            )


def compatible(version: str, wanted: str) -> bool:
    """Return whether a version is what `~=wanted` means: of that series, and not older."""
    there, lowest = numbers(version), numbers(wanted)
    return there[: len(lowest) - 1] == lowest[:-1] and there >= lowest


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release, `(0, 2, 1)` for `0.2.1rc1`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()

"""Check that the installed wheels of this project are compatible, which pip does not enforce.

`pip install --upgrade scaletorch-pg` may install a new series although another wheel needs the old
one: pip prints a warning and succeeds. So each wheel compares versions at import. A vendored copy
does the same, with the versions of the copies instead of those installed. Released wheels call
`require_siblings` of any `scaletorch-dist` they find: its name and arguments must not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import VersionMismatchError


def require_siblings(wheel: str, version: str, found: Mapping[str, str]) -> None:
    """Raise unless all siblings are compatible.

    Args:
        wheel: Name of the wheel that needs the siblings.
        version: Version of that wheel.
        found: The sibling's version for each pin in the wheel's metadata (`scaletorch-pg~=0.1.0`).

    Raises:
        VersionMismatchError: A sibling is older than its pin, or of another series.
    """
    for pin, there in found.items():
        sibling, _, wanted = pin.partition("~=")
        if not compatible(there, wanted):
            raise VersionMismatchError(
                f"{wheel} {version} works with {pin}, but {sibling} {there} is installed. "
                f"`pip install {wheel}=={version}`, or newer, installs siblings that fit; "
                "update copies in another project together."
            )


def compatible(version: str, wanted: str) -> bool:
    """Return whether a version satisfies `~=wanted`: the same series, and not older."""
    there, lowest = numbers(version), numbers(wanted)
    return there[: len(lowest) - 1] == lowest[:-1] and there >= lowest


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release, such as `(0, 2, 1)` for `0.2.1rc1`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()

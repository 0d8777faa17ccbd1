"""Sweeps over layouts and models that take minutes: a share of them each day."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def today(cases: Sequence[Case], days: int) -> list[Case]:
    """Return today's share of a sweep, so that `days` days in a row try all of it.

    With SCALETORCH_SWEEPS=all in the environment every share is today's.
    """
    if os.environ.get("SCALETORCH_SWEEPS") == "all":
        return list(cases)
    return list(cases[int(time.time() // 86400) % days :: days])

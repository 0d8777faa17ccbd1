"""Begin to measure lines in this process, where its environment tells to; see `covered`.

It is copied into environments in which tests run, and imported when a Python of theirs starts.
"""

from __future__ import annotations

import os

if os.environ.get("COVERAGE_PROCESS_CONFIG"):
    import coverage

    coverage.process_startup()

    def __rank_state__() -> None:
        """Save: ranks ask every module this after each function, and may be killed in the next."""
        current = coverage.Coverage.current()
        if current is not None:
            current.save()

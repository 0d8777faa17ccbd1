"""Start measuring lines in this process if its environment says so; see `covered`.

It is copied into test environments, and imported when their Python starts.
"""

from __future__ import annotations

import os

if os.environ.get("COVERAGE_PROCESS_CONFIG"):
    import coverage

    coverage.process_startup()

    def __rank_state__() -> None:
        """Save: ranks call this after each function, and may be killed in the next one."""
        current = coverage.Coverage.current()
        if current is not None:
            current.save()

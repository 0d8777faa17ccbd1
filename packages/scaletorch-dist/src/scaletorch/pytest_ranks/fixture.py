"""The object that the fixture `ranks` gives to a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Ranks:
    """Runs functions on ranks of this machine, as `scaletorch.dist.testing` does."""

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Return what `fn(*args)` returned on each of `world_size` ranks.

        Args:
            fn: As for `scaletorch.dist.testing.run_ranks`, and so the others.
            world_size: Number of ranks.
            args: What `fn` is given; must pickle.
            options: Those of `run_ranks`, and what `fn` is given by name.

        Raises:
            RankFailedError: With the traceback of every rank that failed, the first failure first.
        """
        __tracebackhide__ = True  # of pytest: the ranks' tracebacks tell
        from ..dist.testing import run_ranks

        return run_ranks(fn, world_size, *args, **options)

    def preload(self, *modules: str) -> None:
        """Import modules once, such as `transformers`, so that ranks started later have them."""
        from ..dist.testing import preload

        preload(*modules)

"""What the fixture `ranks` gives to a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Ranks:
    """Runs functions on ranks of this machine; see `scaletorch.dist.testing`."""

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        init: bool = True,
        env: Mapping[str, str | None] | None = None,
        backend: str | None = "gloo",
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on `world_size` ranks that share a group.

        Args:
            fn: As for `scaletorch.dist.testing.run_ranks`, and so the others.
            world_size: Number of ranks.
            args: What `fn` is given; must pickle.
            timeout: Seconds for the call.
            init: Whether ranks have a group.
            env: Variables to set in each rank, or to remove: None.
            backend: Of the group; 'nccl' for ranks that compute on a GPU, or share one.
            kwargs: What `fn` is given by name; must pickle.

        Returns:
            What each rank returned, by rank.

        Raises:
            InvalidArgumentError: Ranks could not find `fn`, or its arguments do not pickle.
            RankFailedError: With the traceback of every rank that failed, the first failure first.
        """
        __tracebackhide__ = True  # of pytest: the ranks' tracebacks tell
        from ..dist.testing import run_ranks

        return run_ranks(
            fn, world_size, *args, timeout=timeout, init=init, env=env, backend=backend, **kwargs
        )

    def preload(self, *modules: str) -> None:
        """Import modules once, so that ranks started from now on have them.

        Args:
            modules: Such as `transformers`, which each rank would else import by itself.
        """
        from ..dist.testing import preload

        preload(*modules)

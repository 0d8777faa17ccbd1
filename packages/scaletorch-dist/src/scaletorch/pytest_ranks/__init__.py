"""A pytest plugin that runs tests on real ranks of this machine, in any project.

pytest finds it if `scaletorch-dist` is installed. It has

- the marker `ranks`: `@pytest.mark.ranks(2)` runs the body of a test on 2 ranks of a gloo group,
  `@pytest.mark.ranks(2, 4, timeout=30)` on 2 and on 4, as two tests,
- the fixture `ranks`: `ranks.run(function, 4)` returns the return values of 4 ranks,
- the fixture `assert_trains_alike` of `scaletorch.verify`, from the package `scaletorch`.

It is separate from `scaletorch.dist`, which imports torch and would delay the start of pytest; that
package is imported only when the first test on ranks runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Ranks"]


class Ranks:
    """Run functions on ranks of this machine, as `scaletorch.dist.testing` does."""

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Run `fn(*args)` on `world_size` ranks; return the return values, one per rank in order.

        Args:
            fn: A module-level function, as for `scaletorch.dist.testing.run_ranks`.
            world_size: Number of ranks.
            args: Positional arguments for `fn`; must pickle.
            options: Options of `run_ranks`, and keyword arguments for `fn`.

        Raises:
            RankFailedError: A rank failed; the message has every traceback, in order.
        """
        __tracebackhide__ = True  # for pytest: the ranks' tracebacks suffice
        from ..dist.testing import run_ranks

        return run_ranks(fn, world_size, *args, **options)

    def preload(self, *modules: str) -> None:
        """Import modules once, such as `transformers`, so that ranks started later have them."""
        from ..dist.testing import preload

        preload(*modules)

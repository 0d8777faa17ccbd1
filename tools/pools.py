"""Ranks that start once and run one cell after another."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from scaletorch.dist.ranks import RankPool


class Pools:
    """Pools of ranks by size; failed ranks are replaced by new ones."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(
        self, ranks: int, fn: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any
    ) -> list[Any]:
        """Return the result of a function on each rank, like `RankPool.run`."""
        pool = self._pools.pop(ranks, None) or RankPool(
            ranks, group_timeout=timedelta(seconds=300), seed=0
        )
        found = pool.run(fn, *args, timeout=timeout, **kwargs)  # a failure ends the ranks
        self._pools[ranks] = pool
        return found

    def close(self) -> None:
        """End all ranks."""
        while self._pools:
            self._pools.popitem()[1].close()

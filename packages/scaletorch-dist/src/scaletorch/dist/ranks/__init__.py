"""Start ranks on this machine, as processes forked from a server that has imported torch."""

from .pool import RankPool, launch

__all__ = ["RankPool", "launch"]

"""Ranks as processes of this machine, forked from a server that has torch loaded."""

from .pool import RankPool, launch

__all__ = ["RankPool", "launch"]

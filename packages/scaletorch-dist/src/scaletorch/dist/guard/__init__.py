"""The doctor: a fault of one rank becomes an error on every rank, within seconds, that names it."""

from .session import start, step, stop, watch

__all__ = ["start", "step", "stop", "watch"]

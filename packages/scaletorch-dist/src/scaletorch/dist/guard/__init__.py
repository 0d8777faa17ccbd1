"""The doctor: a fault of one rank becomes an error on every rank, within seconds, that names it."""

from .control import start, step, stop, tell, watch

__all__ = ["start", "step", "stop", "tell", "watch"]

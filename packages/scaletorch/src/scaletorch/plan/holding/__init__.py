"""What a rank has: its blocks, its parameters in buckets, the micro-batches alive on it."""

from .buckets import Optimizer
from .holdings import Holdings
from .stages import places, schedule_of

__all__ = ["Holdings", "Optimizer", "places", "schedule_of"]

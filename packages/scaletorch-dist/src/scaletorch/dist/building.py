"""Names for packages that build on this one, such as the strategies; users do not need them.

They cover agreement over ranks, building blocks for sums and messages, functions that ranks find by
name, and the hook of a guard. They are recorded and versioned like the public names: a patch
release does not change them, so that wheels of one series work together. Names that are neither
here nor in a public module are private to this package.
"""

from .agreement import agree, caught
from .collectives.all_to_all import all_to_all_flat
from .collectives.flat import all_gather_flat, all_reduce_flat, reduce_scatter_flat
from .devices.current import prepare_backward
from .launchers.interfaces import is_loopback
from .members import name_ranks
from .ranks.collect import without_coordinates
from .ranks.locate import Locator, locate
from .tensors import map_tensors, relative_error, tensors_in, worst
from .wire.backend import gather_ints, host_device
from .wire.checks import describe
from .wire.port import (
    Guard,
    install_guard,
    tell_guard,
)
from .wire.sums import even_parts, sum_dtype
from .world.hosts import this_host
from .world.info import one_per_process

__all__ = [
    "Guard",
    "Locator",
    "agree",
    "all_gather_flat",
    "all_reduce_flat",
    "all_to_all_flat",
    "caught",
    "describe",
    "even_parts",
    "gather_ints",
    "host_device",
    "install_guard",
    "is_loopback",
    "locate",
    "map_tensors",
    "name_ranks",
    "one_per_process",
    "prepare_backward",
    "reduce_scatter_flat",
    "relative_error",
    "sum_dtype",
    "tell_guard",
    "tensors_in",
    "this_host",
    "without_coordinates",
    "worst",
]

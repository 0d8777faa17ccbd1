"""Names for packages that build on this one, such as the strategies; users do not need them.

They cover agreement over ranks, building blocks for sums and messages, functions that ranks find by
name, and the hook of a guard. They are recorded and versioned like the public names: a patch
release does not change them, so that wheels of one series work together. Names that are
neither in this module nor in a public one are private to this package.
"""

from .collectives.all_to_all import all_to_all_flat as all_to_all_flat
from .collectives.shards import all_gather_flat as all_gather_flat
from .collectives.shards import all_reduce_flat as all_reduce_flat
from .collectives.shards import reduce_scatter_flat as reduce_scatter_flat
from .devices.current import prepare_backward as prepare_backward
from .launchers import is_loopback as is_loopback
from .members import name_ranks as name_ranks
from .ranks.locate import Locator as Locator
from .ranks.locate import locate as locate
from .ranks.process import without_coordinates as without_coordinates
from .tensors import map_tensors as map_tensors
from .tensors import relative_error as relative_error
from .tensors import tensors_in as tensors_in
from .tensors import worst as worst
from .wire.backend import Guard as Guard
from .wire.backend import gather_ints as gather_ints
from .wire.backend import host_device as host_device
from .wire.backend import install_guard as install_guard
from .wire.backend import tell_guard as tell_guard
from .wire.checks import agree as agree
from .wire.checks import caught as caught
from .wire.checks import describe as describe
from .wire.recipes import even_counts as even_counts
from .wire.recipes import sum_dtype as sum_dtype
from .world.info import one_per_process as one_per_process
from .world.info import this_host as this_host

"""The wheel's version, and a check of the sibling wheels that planning needs.

`compose` checks the others, which import torch; planning does not.
"""

from ..dist._version import __version__ as dist
from ..dist.siblings import require_siblings
from ..parallel.pg_manager._version import __version__ as pg
from ..parallel.pipeline_parallel._version import __version__ as pp

__version__ = "0.1.0"

require_siblings(
    "scaletorch",
    __version__,
    {"scaletorch-dist~=0.1.0": dist, "scaletorch-pg~=0.1.0": pg, "scaletorch-pp~=0.1.0": pp},
)

"""The wheel's version, and a check of the sibling versions pinned in its metadata."""

from ...dist._version import __version__ as dist
from ...dist.siblings import require_siblings
from ..pg_manager._version import __version__ as pg

__version__ = "0.1.0"

require_siblings(
    "scaletorch-tp", __version__, {"scaletorch-dist~=0.1.0": dist, "scaletorch-pg~=0.1.0": pg}
)

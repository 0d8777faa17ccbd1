"""The wheel's version, and a check of its sibling's version against the pin in its metadata."""

from ..dist._version import __version__ as dist
from ..dist.siblings import require_siblings

__version__ = "0.1.0"

require_siblings("scaletorch-guard", __version__, {"scaletorch-dist~=0.1.0": dist})

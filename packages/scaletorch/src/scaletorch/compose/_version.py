"""The wheel's version, and the sibling versions that it requires, as pinned in its metadata."""

from ..dist._version import __version__ as dist
from ..dist.siblings import require_siblings
from ..guard._version import __version__ as guard
from ..parallel.context_parallel._version import __version__ as cp
from ..parallel.data_parallel._version import __version__ as dp
from ..parallel.expert_parallel._version import __version__ as ep
from ..parallel.pg_manager._version import __version__ as pg
from ..parallel.pipeline_parallel._version import __version__ as pp
from ..parallel.tensor_parallel._version import __version__ as tp

__version__ = "0.1.0"

require_siblings(
    "scaletorch",
    __version__,
    {
        "scaletorch-cp~=0.1.0": cp,
        "scaletorch-dist~=0.1.0": dist,
        "scaletorch-dp~=0.1.0": dp,
        "scaletorch-ep~=0.1.0": ep,
        "scaletorch-guard~=0.1.0": guard,
        "scaletorch-pg~=0.1.0": pg,
        "scaletorch-pp~=0.1.0": pp,
        "scaletorch-tp~=0.1.0": tp,
    },
)

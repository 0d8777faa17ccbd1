"""All public names of the package; `deferred` imports each on first access."""

from torch.distributed import ReduceOp

from ._version import __version__
from .collectives.broadcast import barrier
from .devices import get_comm_device
from .dist import (
    Work,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    all_to_all,
    broadcast,
    broadcast_object_list,
    collect_results,
    exchange,
    gather,
    gather_object,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    sync_random_seed,
)
from .errors import (
    InvalidArgumentError,
    MismatchError,
    NonFiniteError,
    NotInGroupError,
    RankFailedError,
    RankFaultError,
    ScaletorchError,
    StateError,
)
from .launchers.environment import infer_launcher
from .members import require_member
from .ranks import RankPool, launch
from .startup.initialize import cleanup_dist, init_dist
from .transport.levels import use_hierarchy
from .wire.checks import check_collectives
from .world.hosts import get_local_rank, get_local_size
from .world.info import (
    get_backend,
    get_default_group,
    get_dist_info,
    get_rank,
    get_timeout,
    get_world_size,
    group_ranks,
    is_distributed,
    is_main_process,
    master_only,
)

__all__ = [
    "InvalidArgumentError",
    "MismatchError",
    "NonFiniteError",
    "NotInGroupError",
    "RankFailedError",
    "RankFaultError",
    "RankPool",
    "ReduceOp",
    "ScaletorchError",
    "StateError",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "check_collectives",
    "cleanup_dist",
    "collect_results",
    "exchange",
    "gather",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_default_group",
    "get_dist_info",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_timeout",
    "get_world_size",
    "group_ranks",
    "infer_launcher",
    "init_dist",
    "irecv",
    "is_distributed",
    "is_main_process",
    "isend",
    "launch",
    "master_only",
    "recv",
    "reduce",
    "reduce_scatter",
    "require_member",
    "scatter",
    "send",
    "sync_random_seed",
    "use_hierarchy",
]

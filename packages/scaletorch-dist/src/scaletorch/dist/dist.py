"""All collectives of `scaletorch.dist`, for one process or many, on every backend.

`collectives` handles tensors, `objects` Python objects, and `params` whole models. Every call takes
`group=None` for the default group; `src`, `dst` and peers are global ranks. A single process sends
nothing and gets the result that a group of one rank would get.
"""

from .collectives.all_to_all import all_to_all
from .collectives.copies import all_gather, broadcast, gather, scatter
from .collectives.messages import exchange, irecv, isend, recv, send
from .collectives.reduce import all_reduce, reduce, reduce_scatter
from .objects.object_calls import (
    all_gather_object,
    broadcast_object_list,
    collect_results,
    gather_object,
)
from .params import all_reduce_dict, all_reduce_params, sync_random_seed
from .wire.work import Work

__all__ = [
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "all_to_all",
    "broadcast",
    "broadcast_object_list",
    "collect_results",
    "exchange",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sync_random_seed",
]

"""All collectives of `scaletorch.dist`, for one process or many, on every backend.

`collectives` handles tensors, `objects` Python objects, and `params` whole models. Every call takes
`group=None` for the default group; `src`, `dst` and peers are global ranks. A single process sends
nothing and gets the result that a group of one rank would get.
"""

from .collectives.all_to_all import all_to_all as all_to_all
from .collectives.copies import all_gather as all_gather
from .collectives.copies import broadcast as broadcast
from .collectives.copies import gather as gather
from .collectives.copies import scatter as scatter
from .collectives.messages import exchange as exchange
from .collectives.messages import irecv as irecv
from .collectives.messages import isend as isend
from .collectives.messages import recv as recv
from .collectives.messages import send as send
from .collectives.reduce import all_reduce as all_reduce
from .collectives.reduce import reduce as reduce
from .collectives.reduce import reduce_scatter as reduce_scatter
from .objects.object_calls import all_gather_object as all_gather_object
from .objects.object_calls import broadcast_object_list as broadcast_object_list
from .objects.object_calls import collect_results as collect_results
from .objects.object_calls import gather_object as gather_object
from .params import all_reduce_dict as all_reduce_dict
from .params import all_reduce_params as all_reduce_params
from .params import sync_random_seed as sync_random_seed
from .wire.backend import Work as Work

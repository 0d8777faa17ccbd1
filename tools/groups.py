"""Process groups that foreign code creates and does not destroy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def own_groups() -> Iterator[None]:
    """Destroy the groups created inside: each has threads, and transformers creates many."""
    groups = distributed_c10d._world.pg_map
    before = set(groups)
    try:
        yield
    finally:
        for group in set(groups) - before:
            dist.destroy_process_group(group)

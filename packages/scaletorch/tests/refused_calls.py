"""Calls of a context-parallel model that are to be refused, and in which words."""

from __future__ import annotations

import re

import pytest
import torch.distributed as c10d

from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.parallel.context_parallel import ShardedSequences


def words_of(calls, batch, given=dict):
    """Return what each call says that is refused, as one rank of the default group.

    Each takes what `given` makes of this rank's shard of a global batch.
    """
    said, length = [], batch["input_ids"].shape[1]
    for call in calls:
        sequences = ShardedSequences(length, layout="contiguous", group=c10d.group.WORLD)
        shard = given(sequences.shard(batch))
        with pytest.raises((InvalidArgumentError, MismatchError)) as refused:
            call(shard)
        said.append(str(refused.value))
    return said


def require_words(refused, of_ranks):
    """Compare what each rank was told with the pattern of each call."""
    for said in of_ranks:
        for call, words in zip(refused, said, strict=True):
            assert re.search(refused[call], words), (call, words)

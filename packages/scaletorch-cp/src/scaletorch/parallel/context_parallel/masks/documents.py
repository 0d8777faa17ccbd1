"""Packed documents of one sequence, given by the positions at which they begin."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, pairwise

from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from .mask import Mask

CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # entries of a batch: documents

Documents = tuple[int, ...]  # their first positions, and the length: (0, a, ..., length)


def read_documents(cu_seqlens: Sequence[int] | Tensor, length: int | None = None) -> Documents:
    """Return cumulative lengths as integers.

    Args:
        cu_seqlens: First positions of the documents, and the end of the last.
        length: The required end, if it is known.

    Raises:
        InvalidArgumentError: A tensor that is not 1-d or not of integers, or values that do not
            ascend from 0 to `length`.
    """
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point()):
        message = (
            f"{describe_rank()}: cu_seqlens must be a 1-d tensor of integers; it is "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
        raise InvalidArgumentError(message)
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    try:
        documents = tuple(map(operator.index, values))
    except TypeError as error:
        message = f"{describe_rank()}: cu_seqlens must be integers (0, a, ..., length): {error}"
        raise InvalidArgumentError(message) from error
    Mask(causal=True, documents=documents)  # checks that they ascend from 0
    if length not in (None, documents[-1]):
        message = (
            f"{describe_rank()}: cu_seqlens must end with the length of the sequences, {length}; "
            f"it ends with {documents[-1]}"
        )
        raise InvalidArgumentError(message)
    return documents


def chunk_documents(documents: Documents, size: int) -> Documents:
    """Divide each document into chunks of `size` positions, counted from its beginning.

    Chunked attention is attention within these chunks as documents.
    """
    starts = chain.from_iterable(range(*ends, size) for ends in pairwise(documents))
    return (*starts, documents[-1])

"""The ring of a context-parallel group, and messages around it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...dist import Work, exchange, get_rank, group_ranks
from ...dist.errors import InvalidArgumentError, StateError
from ..pg_manager import axis_group, describe_rank
from ..pg_manager.building import connect

__all__ = ["ContextCommunicate", "Ring", "ring_of"]


@dataclass(frozen=True, slots=True)
class Ring:
    """This rank's place among the ranks that share a sequence."""

    group: ProcessGroup | None  # for messages; None is one process
    ranks: tuple[int, ...]  # global ranks in ring order: all or some of the group
    index: int  # of this rank in `ranks`, and so of its shard of the sequence

    @property
    def size(self) -> int:
        """Number of ranks, and so of shards of the sequence."""
        return len(self.ranks)

    @property
    def next_rank(self) -> int:
        """Global rank of the receiver of this rank's messages."""
        return self.ranks[(self.index + 1) % self.size]

    @property
    def prev_rank(self) -> int:
        """Global rank of the sender of this rank's messages."""
        return self.ranks[self.index - 1]


def ring_of(group: ProcessGroup | Ring | None = None) -> Ring:
    """Return the ring over `group`, by default the manager's cp axis.

    Raises:
        NotInGroupError: This rank is outside `group`.
        StateError: Several ranks, and neither a group nor a process group manager.
    """
    if isinstance(group, Ring):
        return group
    group = axis_group("cp") if group is None else group
    if group is None:
        return Ring(None, (get_rank(),), 0)
    ranks = group_ranks(group)
    return Ring(group, ranks, ranks.index(get_rank()))


def connect_ring(ring: Ring, method: str, *, all_pairs: bool) -> None:
    """Open the connections that a method, or an exchange of `all_pairs`, needs; all ranks call."""
    places = range(ring.size)
    pairs = [*pairwise(places), (0, ring.size - 1)] if method == "ring" else []
    all_pairs = all_pairs or method not in ("ring", "all_gather")
    connect(ring.group, combinations(places, 2) if all_pairs else set(pairs))


class ContextCommunicate:
    """Send tensors to the next rank of the ring: queue them, launch one batch, wait for it.

    Every rank of the group makes the same calls with tensors of the same shapes and dtypes.
    Messages are matched by the order in which they were queued. In a ring of one rank the message
    received is a copy. The object can be used again for the next step.

    Example:
        >>> ring = ContextCommunicate("keys and values")
        >>> next_k, next_v = ring.send_recv(k), ring.send_recv(v)
        >>> ring.commit()     # in flight: compute with k and v meanwhile, and do not change them
        >>> ring.wait()       # next_k and next_v hold the previous rank's k and v
    """

    def __init__(self, msg: str = "", group: ProcessGroup | Ring | None = None) -> None:
        """Find the ring: see `ring_of`. `msg` names the messages, for errors."""
        self.msg = msg
        self.ring = ring_of(group)
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._work: Work[None] | None = None

    def send_recv(self, tensor: Tensor, recv: Tensor | None = None) -> Tensor:
        """Queue `tensor` for the next rank, and return the tensor for the previous rank's message.

        Args:
            tensor: The tensor to send; leave it unchanged until `wait()`.
            recv: The tensor to receive into, of the same shape, dtype and device; by default a new
                one.

        Returns:
            The tensor that holds the received values after `commit()` and `wait()`.

        Raises:
            StateError: The last batch is still in flight.
            InvalidArgumentError: `recv` differs from `tensor` in shape, dtype or device, or
                shares its memory.
        """
        if self._work is not None:
            raise self._misuse("send_recv() while a batch is in flight: call wait() first")
        tensor = tensor.detach()
        if recv is None:
            recv = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        else:
            self._check_recv(tensor, recv)
        self._queue.append((tensor, recv))
        return recv

    def commit(self) -> None:
        """Launch all queued messages as one batch, and return at once.

        Raises:
            StateError: Nothing is queued, or the last batch is still in flight.
        """
        if self._work is not None:
            raise self._misuse("commit() while a batch is in flight: call wait() first")
        if not self._queue:
            raise self._misuse("commit() with nothing queued: call send_recv() first")
        self._work = exchange(
            sends=[(tensor, self.ring.next_rank) for tensor, _ in self._queue],
            recvs=[(recv, self.ring.prev_rank) for _, recv in self._queue],
            group=self.ring.group,
            async_op=True,
        )

    def wait(self) -> None:
        """Wait until the batch has arrived and sent tensors may be changed.

        Raises:
            StateError: No batch is in flight.
        """
        if self._work is None:
            raise self._misuse("wait() with no batch in flight: call commit() first")
        self._work.wait()
        self._work = None
        self._queue.clear()

    def _check_recv(self, tensor: Tensor, recv: Tensor) -> None:
        sent, got = (f"{list(x.shape)} {x.dtype} on {x.device}" for x in (tensor, recv))
        shared = recv.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if sent != got or shared:
            raise InvalidArgumentError(
                f"{self._name()}: recv must be like the tensor sent, {sent}, in memory of its own; "
                f"it is {got}{' in the same memory' * shared}"
            )

    def _misuse(self, what: str) -> StateError:
        return StateError(f"{self._name()}: {what}")

    def _name(self) -> str:
        return f"ContextCommunicate({self.msg!r}) on {describe_rank()}"

"""All buckets of a model, launched in the same order on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....dist import all_reduce, broadcast, group_ranks
from ....dist.errors import MismatchError, NonFiniteError, ScaletorchError, StateError
from ...pg_manager import describe_rank
from ..parameters import name_culprits, share_names, shorten
from .bucket import LATE, NONFINITE, UNUSED, Bucket, Reduction, Slot

# What ranks must have done alike; formatted with the number of this rank and those of others.
_DISAGREEMENTS = (
    "this backward adds to gradients of an earlier one on some ranks and begins without on others "
    "(it adds on this rank: {own}): the ranks ran backward or zero_grad a different number of "
    "times",
    "this rank has made and dropped gradients {own} times without a synchronisation, and other "
    "ranks {low} to {high} times: only some were in no_sync(), and may have updated with their "
    "own gradients; enter and leave it on all ranks together",
    "{own} of the parameters of this rank that were trainable when wrapped require grad now, and "
    "on other ranks {low} to {high}: gradients would be sums over only some ranks; freeze the "
    "same parameters on all ranks",
)
FEW = 8  # the least number of buckets, so that messages overlap with backward
SMALL = 2**18  # elements of a bucket that takes about as long to start as to send


class BucketManager:
    """Reduces slots over a group in buckets, in the same order on every rank.

    A bucket is launched only after all before it, so that ranks that use different parameters
    still issue the same calls in the same order.

    Args:
        slots: All trainable parameters' slots, in registration order.
        reduction: The options of the reductions.
        bucket_size: Maximum elements of a bucket; 1 gives every parameter a bucket of its own.
        grad_type: Dtype of the buffers of floating gradients; None is each parameter's own.
        check_finite: Whether to check gradients for NaN and infinity before they travel.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        reduction: Reduction,
        bucket_size: int = 1,
        grad_type: torch.dtype | None = None,
        *,
        check_finite: bool = False,
    ) -> None:
        self.slots = tuple(slots)
        self.reduction = reduction
        self.order: list[int] | None = []  # of gradients in the first backward; then None
        self.eager = False  # whether every backward sums into shards, and keeps no buffer
        self.checks_finite = check_finite
        self._bucket_size, self._grad_type = bucket_size, grad_type
        self._adds = False  # whether this backward adds to gradients of an earlier synchronisation
        self._dropped = 0  # how often this rank's own gradients were dropped since
        # Backward makes gradients in about the reverse order of registration.
        self.use_buckets(self.fill(reversed(self.slots)))

    def fill(self, slots: Iterable[Slot]) -> list[Bucket]:
        """Divide slots, in the given order, into buckets of at most `bucket_size` elements.

        A bucket has one dtype and one device, and at least one parameter, however large. At least
        about `FEW` are made, unless they would be smaller than `SMALL`. The first has at most
        `SMALL` elements, so that its reduction begins early. Buckets are in the order of their last
        parameters.
        """
        slots = list(slots)
        share = sum(slot.parameter.numel() for slot in slots) // FEW
        usual = min(self._bucket_size, max(share, SMALL))
        members: list[tuple[torch.dtype, list[Slot]]] = []
        current: dict[Any, list[Slot]] = {}
        room: dict[Any, int] = {}
        place = {slot.index: at for at, slot in enumerate(slots)}
        for slot in slots:
            own = slot.parameter.dtype
            dtype = own if self._grad_type is None or not own.is_floating_point else self._grad_type
            key = (dtype, own, slot.parameter.device)
            elements = slot.parameter.numel()
            if elements > room.get(key, -1):
                current[key], room[key] = [], usual if members else min(usual, SMALL)
                members.append((dtype, current[key]))
            current[key].append(slot)
            room[key] -= elements
        members.sort(key=lambda entry: place[entry[1][-1].index])
        return [Bucket(slots, dtype, self.reduction.multiple(dtype)) for dtype, slots in members]

    def use_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Use other buckets over the same slots; nothing may be in flight."""
        self.buckets = tuple(buckets)
        self._next, self._expected = 0, self.buckets
        self._in_flight: list[Bucket] = []  # with memory to free as soon as they arrive
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}

    @property
    def has_work(self) -> bool:
        """True if gradients are summed, kept in another dtype, or checked."""
        wider = any(b.dtype != slot.parameter.dtype for b in self.buckets for slot in b.slots)
        return self.reduction.size > 1 or wider or self.checks_finite

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Hold and sum gradients in float32 at least, within a context; see `widened`.

        A backward within it does not set the order of the buckets.
        """
        before = self.reduction, self.order, [bucket.dtype for bucket in self.buckets]
        self.reduction, self.order = replace(self.reduction, dtype=None), None
        for bucket in self.buckets:
            bucket.convert(torch.promote_types(bucket.dtype, torch.float32))
        try:
            yield
        finally:
            self.reduction, self.order, dtypes = before
            for bucket, dtype in zip(self.buckets, dtypes, strict=True):
                bucket.convert(dtype)

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Limit the next backward to the buckets of these parameters, the same on all ranks."""
        reached = {id(parameter) for parameter in parameters}
        self._expected = tuple(
            bucket
            for bucket in self.buckets
            if any(id(slot.parameter) in reached for slot in bucket.slots)
        )

    def open(self) -> None:
        """Follow, when a backward begins, the user's changes to gradients since the last one."""
        local = sum(slot.local for slot in self.slots)
        dropped = sum(bucket.open() for bucket in self.buckets)
        self._dropped += 0 < local == dropped  # all of them: ranks may use different parameters
        self._adds = any(slot.has_synchronised for slot in self.slots)

    def place(self, slot: Slot) -> Tensor:
        """Return the memory of one parameter's gradient; its values are arbitrary."""
        return self._bucket_of[slot.index].place(slot)

    def mark_ready(self, index: int, launch: bool = True) -> None:
        """Note that a parameter has its gradient, and launch the buckets that are due."""
        if self.order is not None:
            self.order.append(index)
        self._bucket_of[index].mark_ready(index)
        if self._in_flight:
            self._in_flight = [b for b in self._in_flight if not b.collect_if_done()]
        due = self._expected if self.reduction.size > 1 else ()  # alone, nothing has to travel
        while launch and self._next < len(due) and due[self._next].ready:
            self._launch(due[self._next])
            self._next += 1

    def require_unchanged(self) -> None:
        """Refuse, when a backward ends, parameters that were updated after their gradients came."""
        for slot in self.slots:
            slot.require_unchanged(ends=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining buckets, wait for all, and write every gradient.

        One more, small reduction shares which parameters any rank used, one int32 for each, and
        whether all ranks have kept and dropped the same gradients.

        Raises:
            NonFiniteError: A gradient of some rank is not finite, and `check_finite` is on.
            MismatchError: The ranks have kept or dropped different gradients.
            StateError: A parameter got another gradient after its bucket had left.
        """
        try:
            for bucket in self._expected:
                if not bucket.launched:
                    self._launch(bucket)
            if self.buckets:
                flags = self._agree()
                for bucket in self._expected:
                    bucket.finish(flags)
            self._reorder()
        except ScaletorchError:  # on every rank
            self.clear()
            raise
        finally:
            self.reset()

    def reset(self) -> None:
        """Forget which gradients are ready and in flight; gradients stay."""
        self._next, self._in_flight, self._expected = 0, [], self.buckets
        for bucket in self.buckets:
            bucket.reset()

    def clear(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            bucket.clear()

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(self.reduction, check_finite=self.checks_finite)
        self._in_flight.append(bucket)

    def _agree(self) -> list[int]:
        """Return for each slot the maximum flag of all ranks; refuse what they disagree about."""
        flags = [UNUSED] * len(self.slots)
        for bucket in self.buckets:
            for slot, flag in bucket.flags():
                flags[slot.index] = flag
        trained = sum(slot.parameter.requires_grad for slot in self.slots)
        facts = (self._adds, self._dropped, trained)
        # On the CPU, so that the host does not wait for an accelerator.
        shared = torch.tensor([*flags, *facts, *(-own for own in facts)], dtype=torch.int32)
        work = all_reduce(shared, "max", group=self.reduction.group, async_op=True)
        for bucket in self.buckets:  # the flags travel meanwhile
            bucket.wait()
        work.wait()
        self._dropped = 0
        found = shared.tolist()
        result, most, least = found[: len(flags)], found[-6:-3], found[-3:]
        for text, own, high, low in zip(_DISAGREEMENTS, facts, most, least, strict=True):
            if high != -low:
                text = text.format(own=own, low=-low, high=high)
                raise MismatchError(f"{describe_rank()}: {text}; all gradients are None now")
        if LATE in result:
            late = [slot.name for slot in self.slots if result[slot.index] == LATE]
            raise StateError(
                f"{describe_rank()}: {shorten(late)} got another gradient after its sum over ranks "
                "had begun, as in a module that a reentrant checkpoint runs again; all gradients "
                "are None now: pass use_reentrant=False to the checkpoints"
            )
        if NONFINITE in result:
            names = [slot.name for slot in self.slots if flags[slot.index] == NONFINITE]
            culprits = name_culprits(share_names(names, self.reduction.group))
            raise NonFiniteError(
                f"{describe_rank()}: gradients are not finite: {culprits}; none was summed, and "
                "all are None now: look at the batches of these ranks, or lower the learning rate"
            )
        return result

    def _reorder(self) -> None:
        """Fill the buckets anew in the order of gradients in the first backward."""
        if self.order is None:
            return
        rest = [slot.index for slot in reversed(self.slots)]
        found = list(dict.fromkeys([*self.order, *rest]))
        self.order = None
        group = self.reduction.group
        if self.reduction.size > 1 and found:  # ranks may differ: the first rank's order counts
            shared = torch.tensor(found)
            broadcast(shared, group_ranks(group)[0], group=group)
            found = shared.tolist()
        if found != [slot.index for bucket in self.buckets for slot in bucket.slots]:
            self.use_buckets(self.fill(self.slots[index] for index in found))

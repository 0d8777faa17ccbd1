"""What an optimizer keeps, and in which buckets gradients travel, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

BUCKET_SIZE = 2**24  # elements, the default of `parallelize`
SMALL = 2**18  # elements of a bucket that costs little more to start than to send
LEAST_BUCKETS = 8  # of a model, where gradients travel in messages


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps, and in what gradients are summed.

    Attributes:
        name: For people.
        moments: Tensors that it keeps of the form of each that it updates.
        item: Bytes of their elements; None is as those of what it updates.
        per_tensor: Bytes besides for each tensor, such as a step.
        sum_item: Bytes of the elements of summed gradients; None is as those of parameters. 4 is
            `grad_type=torch.float32`.
        bucket_size: As for `parallelize`.
        native: Whether the backend sums shards by itself, as NCCL does, but of 16-bit floats, which
            are summed here; gloo takes all that other ranks send.
    """

    name: str = "AdamW"
    moments: int = 2
    item: int | None = None
    per_tensor: int = 4
    sum_item: int | None = None
    bucket_size: int = BUCKET_SIZE
    native: bool = True


Backward = tuple[int, bool]  # of a rank: its chunk, and whether it is the second half of it


class Held(NamedTuple):
    """A parameter on a rank.

    Attributes:
        elements: Of its shard on this tp or ep rank.
        item: Bytes of an element.
        others: How many other ranks of the pipeline hold it too.
        expert: Whether its gradient is summed over edp, and not over cp x dp.
        chunk: Of the rank, the first that has it.
        late: Whether the second half of a backward makes its gradient, if it has halves.
        name: With its kind of block, as `Description.tied` has it.
        also: Which other backwards make a part of its gradient, if it is tied.
    """

    elements: int
    item: int
    others: int = 0
    expert: bool = False
    chunk: int = 0
    late: bool = False
    name: str = ""
    also: tuple[Backward, ...] = ()


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        sizes: Elements of its parameters, in order.
        item: Bytes of an element of a parameter.
        sharded: Whether each rank has its shard of them (ZeRO).
        backwards: Which backward makes each of its gradients, in order: its chunk of the rank, and
            whether the second half of it does, if it has halves.
        gathered: With ZeRO 3, what is gathered together: "layer", for its forward and again for its
            backward, or "rest", once for both.
        also: Other backwards that make a part of tied ones.
        elements: Of all parameters.
        single: Whether one backward makes all of its gradients.
    """

    sizes: tuple[int, ...]
    item: int
    sharded: bool
    backwards: tuple[tuple[int, bool], ...]
    gathered: Literal["", "layer", "rest"] = ""
    also: tuple[Backward, ...] = ()
    elements: int = field(init=False, compare=False)
    single: bool = field(init=False, compare=False)
    hashed: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Work out once what a search asks very often."""
        own = self.sizes, self.item, self.sharded, self.backwards, self.gathered, self.also
        object.__setattr__(self, "hashed", hash(own))
        object.__setattr__(self, "elements", sum(self.sizes))
        first = self.backwards[0]
        object.__setattr__(self, "single", self.backwards.count(first) == len(self.backwards))

    def __hash__(self) -> int:
        """Return the hash of what it is made of."""
        return self.hashed

    def padded(self, ranks: int) -> int:
        """Return the elements of its memory: shards, of each parameter with ZeRO 3, are equal."""
        if self.gathered:
            return sum(-(-size // ranks) for size in self.sizes) * ranks
        return -(-self.elements // ranks) * ranks if self.sharded else self.elements

    def sum_item(self, optimizer: Optimizer) -> int:
        """Return the bytes of an element of its gradients' sum."""
        return optimizer.sum_item or self.item

    def summed_here(self, optimizer: Optimizer) -> bool:
        """Return whether a rank takes all that others send for its shard, and adds it up."""
        return not optimizer.native or self.sum_item(optimizer) == 2

    def master_item(self, zero: int) -> int:
        """Return those of a shard: float32 at least; `fully_shard`'s are as parameters are."""
        return self.item if zero == 3 else max(self.item, 4)

    def sums(self, backwards: Sequence[int]) -> int:
        """Return how often a step with ZeRO 2 sums it.

        Args:
            backwards: How many there are of each chunk, halves of one as two.
        """
        return sum(times for chunk, times in enumerate(backwards) if self.reached(chunk))

    def reached(self, chunk: int) -> bool:
        """Return whether backwards of a chunk sum it."""
        return any(own == chunk for own, _ in (*self.backwards, *self.also))

    def made(self, ranks: int, rank: int, halves: tuple[bool, ...]) -> set[tuple[int, bool]]:
        """Return which backwards make any gradient of a rank's shard: chunk, and second half.

        Args:
            ranks: That sum it.
            rank: Which of these.
            halves: Whether the first backward of each chunk comes in two.
        """
        each = {self.backwards[0]}
        if not self.single:
            each = {backward for _, backward in self.shards(ranks, rank)}
        return {(chunk, late and chunk < len(halves) and halves[chunk]) for chunk, late in each}

    def changing(self, ranks: int) -> set[int]:
        """Return the ranks in whose shards of it another backward's gradients begin."""
        share, at, found = self.padded(ranks) // ranks, 0, set[int]()
        for size, (before, after) in zip(self.sizes, pairwise(self.backwards), strict=False):
            at += size
            if before != after:
                found.add(at // share)
        return found

    def shards(self, ranks: int, rank: int) -> list[tuple[int, tuple[int, bool]]]:
        """Return elements and backward of each tensor that a rank's optimizer has of it."""
        if not self.sharded:
            return list(zip(self.sizes, self.backwards, strict=True))
        if self.gathered:
            each = (-(-size // ranks) for size in self.sizes)
            return list(zip(each, self.backwards, strict=True))
        share = self.padded(ranks) // ranks
        start, stop, at, found = share * rank, share * (rank + 1), 0, []
        for size, backward in zip(self.sizes, self.backwards, strict=True):
            if at >= stop:
                break
            found.append((min(stop, at + size) - max(start, at), backward))
            at += size
        return [(size, backward) for size, backward in found if size > 0]


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """The buckets of a rank that are summed over the same ranks; a key by identity.

    Attributes:
        each: Buckets, and how often each occurs.
    """

    each: tuple[tuple[Bucket, int], ...]

    def fullest(self, ranks: int, halves: tuple[bool, ...]) -> int:
        """Return the rank for whose shards the most bytes are made by a backward each."""
        unlike = [each for each in self.each if each[0].sharded and not each[0].single]
        found = {at for bucket, _ in unlike for at in bucket.changing(ranks)}

        def made(rank: int) -> int:
            return sum(
                times * bucket.padded(ranks) * len(bucket.made(ranks, rank, halves))
                for bucket, times in unlike
            )

        return max(sorted({0, *found}), key=made)


def fill(held: Sequence[Held], bucket_size: int) -> list[tuple[Held, ...]]:
    """Part gradients into buckets as `DataParallelBucket` does if they travel in messages.

    Args:
        held: Parameters in the order in which backward makes their gradients.
        bucket_size: The most elements of a bucket of several.
    """
    usual = min(bucket_size, max(sum([p[0] for p in held]) // LEAST_BUCKETS, SMALL))
    members: list[list[Held]] = []
    ends: list[int] = []
    current: dict[int, int] = {}
    room: dict[int, int] = {}
    for place, each in enumerate(held):
        elements, item = each[0], each[1]
        if elements > room.get(item, -1):
            current[item] = len(members)
            room[item] = usual if members else min(usual, SMALL)
            members.append([])
            ends.append(place)
        own = current[item]
        members[own].append(each)
        ends[own] = place
        room[item] -= elements
    return [tuple(members[own]) for own in sorted(range(len(members)), key=ends.__getitem__)]


def bucket_of(
    held: Sequence[Held], *, sharded: bool, gathered: Literal["", "layer", "rest"] = ""
) -> Bucket:
    """Return the bucket of these parameters."""
    sizes, items, _, _, chunks, late, _, also = zip(*held, strict=True)
    others = tuple(sorted({each for own in also for each in own}))
    backwards = tuple(zip(chunks, late, strict=True))
    return Bucket(sizes, items[0], sharded, backwards, gathered, others)

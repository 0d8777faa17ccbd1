"""Stand-ins before every call on a process group, and the order of these calls, compared."""

import threading
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

MOST = 128  # messages in one batch: NCCL cuts longer ones, on two ranks otherwise
ONE_SIDED = {"gather", "scatter"}  # one member alone has the tensors of all
UNEVEN = {"all_to_all_single", "alltoall_base", "alltoall"}  # each pair has its size
CALLS = [
    name
    for name in vars(ProcessGroup)
    if name in {"send", "recv", "broadcast", "barrier", "reduce", *ONE_SIDED, *UNEVEN}
    or name.strip("_").startswith(("allreduce", "allgather", "all_gather", "reduce_scatter"))
]


@contextmanager
def standing_before(wrap):
    """Put what `wrap(name, call)` returns in the place of each call on a process group."""
    with ExitStack() as stack:
        for name in CALLS:
            wrapped = wrap(name, getattr(ProcessGroup, name))
            stack.enter_context(patch.object(ProcessGroup, name, wrapped))
        yield


class Called(NamedTuple):
    """A call of this rank."""

    where: tuple[str, tuple[int, ...], str]  # the group's name, its ranks, the kind of device
    name: str  # "made" is that of the group itself
    facts: tuple  # what all members have alike, or both ends
    peer: int | None  # the other end of a message; None for a collective
    late: bool  # whether construction had ended
    # Of an uneven exchange: elements from each rank, and for each.
    sizes: tuple[tuple[int, ...], ...] | None = None


class Recorder:
    """Notes this process's calls, on all its threads, in the order in which they are made."""

    def __init__(self):
        self.calls, self.most, self.late = [], 0, False
        self._lock = threading.Lock()

    @contextmanager
    def recording(self):
        """Note calls, batches, and groups that are made."""
        batch, made = c10d.batch_isend_irecv, c10d.new_group

        def batched(messages):
            self.most = max(self.most, len(messages))
            return batch(messages)

        def grouped(*args, **options):
            group = made(*args, **options)
            if isinstance(group, ProcessGroup):
                self._note(group, "", "made", (), None)
            return group

        patches = patch.multiple(c10d, batch_isend_irecv=batched, new_group=grouped)
        with patches, standing_before(self._wrap):
            yield self

    def _wrap(self, name, call):
        def noted(group, *args, **options):
            tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
            device = tensors[0].device.type if tensors else ""
            peer = None
            if name in ("send", "recv"):
                peer = c10d.get_process_group_ranks(group)[args[1]]
                facts = tensors[0].numel(), str(tensors[0].dtype), args[2]
            else:
                facts = _facts(name, tensors, [*args, *options.values()])
            sizes = _sizes(group, args) if name in ("alltoall_base", "all_to_all_single") else None
            self._note(group, device, name, facts, peer, sizes)
            return call(group, *args, **options)

        return noted

    def _note(self, group, device, name, facts, peer, sizes=None):
        where = group.group_name, tuple(c10d.get_process_group_ranks(group)), device
        with self._lock:
            self.calls.append(Called(where, name, facts, peer, self.late, sizes))


def _facts(name, tensors, args):
    """Describe what all members of a group must have alike in a collective."""
    facts = [str(tensors[0].dtype)] if tensors else []
    if name not in UNEVEN | ONE_SIDED:
        facts += [(tuple(x.shape), str(x.dtype)) for x in tensors]
    for options in args:
        facts += [str(options.reduceOp.op)] if hasattr(options, "reduceOp") else []
        facts += [options.rootRank] if hasattr(options, "rootRank") else []
    return tuple(facts)


def _sizes(group, args):
    """Return the elements that come from each rank and go to each, of an exchange of one tensor."""
    output, given, comes, goes = args[:4]
    count = group.size()
    even = [[x.numel() // count] * count for x in (output, given)]
    rows = [x[0].numel() if len(x) else 0 for x in (output, given)]
    told = [[n * row for n in each] for each, row in zip((comes, goes), rows, strict=True)]
    return tuple(tuple(each or one) for each, one in zip(told, even, strict=True))


def faults(ranks):
    """Return what is wrong with the recorded calls of all ranks, as lines."""
    calls = [[c for c in rank.calls if c.name != "made"] for rank in ranks]
    found = [*_late(ranks), *_collectives(calls), *_messages(calls), *_cycle(calls)]
    for rank, each in enumerate(ranks):
        if each.most > MOST:
            found.append(f"rank {rank} has a batch of {each.most} messages")
    return found


def _late(ranks):
    """Find groups made, and communicators and paths of a device first used, after construction."""
    for rank, each in enumerate(ranks):
        known = set()
        for call in each.calls:
            if call.where[2] == "cpu":
                continue
            uses = {call.where, (call.where, call.name, call.peer)}
            if call.peer is None:
                uses = {call if call.name == "made" else call.where}
            if call.late and not uses <= known:
                yield f"rank {rank}: {_said(call)} is a first use, after construction"
            if len(call.where[1]) == 1 and call.name != "made":
                yield f"rank {rank}: {_said(call)} is a call on a group of one rank"
            known |= uses


def _collectives(calls):
    """Find communicators on which the members' collectives differ."""
    for where, by_rank in _by_communicator(calls).items():
        rows = [[(c.name, c.facts) for c in by_rank[rank]] for rank in where[1]]
        for place, row in enumerate(zip_longest(*rows)):
            if len(set(row)) > 1:
                yield f"{where}: collective {place} differs between members: {row}"
                break
        else:
            yield from _exchanges(where, [by_rank[rank] for rank in where[1]])


def _exchanges(where, rows):
    """Find exchanges of which a member sends another number than the other one expects."""
    for place, calls in enumerate(zip(*rows, strict=True)):
        if all(call.sizes for call in calls):
            comes, goes = zip(*(call.sizes for call in calls), strict=True)
            if list(zip(*goes, strict=True)) != list(comes):
                yield f"{where}: collective {place} sends {goes} where {comes} is expected"


def _messages(calls):
    """Find pairs of ranks of which one sends otherwise than the other receives."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, each in enumerate(calls):
        for c in each:
            if c.peer is not None:
                path = (rank, c.peer) if c.name == "send" else (c.peer, rank)
                (sent if c.name == "send" else received)[c.where, *path].append(c.facts)
    for path in {*sent, *received}:
        if sent[path] != received[path]:
            counts = Counter(sent[path]), Counter(received[path])
            what = "order" if counts[0] == counts[1] else f"messages: {counts[0]}, {counts[1]}"
            yield f"{path}: sends and receives differ in their {what}"


def _cycle(calls):
    """Find collectives of several communicators that some ranks make in another order."""
    graph = TopologicalSorter()
    for each in calls:
        counts, row = Counter(), []
        for call in each:
            if call.peer is None:
                row.append((call.where, counts[call.where]))
                counts[call.where] += 1
        for before, after in pairwise(row):
            graph.add(after, before)
    try:
        graph.prepare()
    except CycleError as error:
        yield f"communicators are used in different orders: {error.args[1]}"


def _by_communicator(calls):
    found = defaultdict(lambda: defaultdict(list))
    for rank, each in enumerate(calls):
        for call in each:
            if call.peer is None:
                found[call.where][rank].append(call)
    return found


def _said(call):
    name, ranks, device = call.where
    return f"{call.name} on {name!r} of ranks {ranks} on {device!r}, peer {call.peer}"

"""Communication of context parallelism has computation behind it, whatever the ranks' speeds."""

import time
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from scaletorch.dist.testing import run_ranks
from scaletorch.dist.wire.work import Work
from scaletorch.parallel.context_parallel import LAYOUTS, attention, cp_comms
from scaletorch.parallel.context_parallel.masks.mask import work
from scaletorch.parallel.context_parallel.methods import gathered
from scaletorch.parallel.context_parallel.methods.call import Call

METHODS = ("ring", "all_gather")
LENGTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


def run(method, kind="zigzag", dtype=torch.float32, between=lambda: None):
    """Return this rank's output and gradients; call `between` forward and backward."""
    generator = torch.Generator().manual_seed(3)
    layout = LAYOUTS[kind](LENGTH, dist.get_world_size())
    held = layout.positions(dist.get_rank())
    shapes = [(1, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    own = [torch.randn(s, generator=generator).to(dtype)[:, :, held].contiguous() for s in shapes]
    before = [x.clone() for x in own]
    q, k, v = (x.requires_grad_() for x in own[:3])
    causal, world = kind != "contiguous", dist.group.WORLD
    out = attention(q, k, v, causal=causal, layout=layout, method=method, group=world)
    between()
    out.backward(own[3])
    assert all(map(torch.equal, own, before)), "an input was changed"
    return [out.detach(), q.grad, k.grad, v.grad]


@contextmanager
def watched():
    """Note what happens: ("start", n, sent, received), ("compute", pairs), ("wait", n)."""
    events, works = [], []

    def started(result, sent, received):
        works.append(result)
        events.append(("start", len(works) - 1, sent, received))
        return result

    def exchanging(sends, recvs, *args, call=cp_comms.exchange, **options):
        sent, received = ([tensor for tensor, _ in side] for side in (sends, recvs))
        return started(call(sends, recvs, *args, **options), sent, received)

    def gathering(x, *args, call=gathered.all_gather, **options):
        return started(call(x, *args, **options), [x] * (dist.get_world_size() - 1), [])

    def summing(shares, ring, call=gathered._summed):
        return started(call(shares, ring), list(shares[1:]), [])

    def computing(call):
        def computed(self, source, *args):
            events.append(("compute", work(self.blocks(source))))
            return call(self, source, *args)

        return computed

    def waiting(self, call=Work.wait):
        events.extend(("wait", index) for index, other in enumerate(works) if other is self)
        return call(self)

    with ExitStack() as stack:
        for owner, name, change in [
            (cp_comms, "exchange", exchanging),
            (gathered, "all_gather", gathering),
            (gathered, "_summed", summing),
            (Call, "attend", computing(Call.attend)),
            (Call, "attend_backward", computing(Call.attend_backward)),
            (Work, "wait", waiting),
        ]:
            stack.enter_context(mock.patch.object(owner, name, change))
        yield events


def behind_each_message(method, kind):
    """Return of each message how many pairs are computed while it is under way."""
    with watched() as events:
        run(method, kind)
    places = {event[:2]: place for place, event in enumerate(events) if event[0] != "compute"}
    assert len(places) == sum(event[0] != "compute" for event in events), "waited for twice"
    return [
        sum(event[1] for event in events[place : places["wait", name[1]]] if event[0] == "compute")
        for name, place in places.items()
        if name[0] == "start"
    ]


@pytest.mark.parametrize("kind", ["zigzag", "stripe", "contiguous"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_message_has_computation_behind_it(size, method, kind):
    # The ring: a message a hop, forward and twice backward. All-gather: K and V forward and
    # backward, and their gradients.
    expected = 3 * (size - 1) if method == "ring" else 5
    for pairs in run_ranks(behind_each_message, size, method, kind):
        assert len(pairs) == expected
        assert min(pairs) > 0, pairs


def bytes_sent(method, dtype):
    """Return the bytes that this rank sends forward and backward."""
    with watched() as events:
        ends = []
        run(method, dtype=dtype, between=lambda: ends.append(len(events)))
    parts = events[: ends[0]], events[ends[0] :]
    starts = [[event[2] for event in part if event[0] == "start"] for part in parts]
    return tuple(sum(x.nbytes for tensors in part for x in tensors) for part in starts)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_sent_are_those_of_the_formula(method, dtype, ratio):
    size = 3
    hops = (size - 1) * 2 * KV_HEADS * LENGTH // size * DIM * dtype.itemsize
    assert run_ranks(bytes_sent, size, method, dtype) == [(hops, hops * (1 + ratio))] * size


def received_into():
    """Return how many places the ring receives keys or values, and gradients, into."""
    with watched() as events:
        run("ring")
    tensors = [x for event in events if event[0] == "start" for x in event[3]]
    return [len({x.data_ptr() for x in tensors if x.dim() == dim}) for dim in (4, 5)]


def test_the_ring_receives_into_two_places_in_turn():
    # Two of K and two of V, forward and again backward; two of the gradients. `events` keeps all
    # of them alive, so that no two share an address. The first to be sent is one of the latter.
    assert run_ranks(received_into, 6) == [[8, 2]] * 6


def with_slow_ranks(method):
    """Return whether bits and inputs stay as they are where a rank computes late."""
    expected = run(method)
    same = []
    for slow in range(dist.get_world_size()):
        late = 0.02 if dist.get_rank() == slow else 0.0

        def slowed(self, source, *args, late=late, call=Call.attend_backward):
            time.sleep(late)
            call(self, source, *args)
            time.sleep(late)

        with mock.patch.object(Call, "attend_backward", slowed):
            same += map(torch.equal, run(method), expected)
    return all(same)


@pytest.mark.parametrize("method", METHODS)
def test_slow_ranks_change_no_bit(method):
    assert all(run_ranks(with_slow_ranks, 4, method))

"""Communication of context parallelism has computation behind it, whatever the ranks' speeds."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense_attention import within

from scaletorch.dist.testing import run_ranks
from scaletorch.dist.wire.backend import Work
from scaletorch.parallel.context_parallel import LAYOUTS, attention, cp_comms
from scaletorch.parallel.context_parallel.methods import all_gather
from scaletorch.parallel.context_parallel.methods.call import Call

METHODS = ("ring", "all_gather")
LENGTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


def run(method, kind="zigzag"):
    """Return this rank's output and gradients."""
    generator = torch.Generator().manual_seed(3)
    layout = LAYOUTS[kind](LENGTH, dist.get_world_size())
    held = layout.positions(dist.get_rank())
    shapes = [(1, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    own = [torch.randn(s, generator=generator)[:, :, held].contiguous() for s in shapes]
    before = [x.clone() for x in own]
    q, k, v = (x.requires_grad_() for x in own[:3])
    causal, world = kind != "contiguous", dist.group.WORLD
    out = attention(q, k, v, causal=causal, layout=layout, method=method, group=world)
    out.backward(own[3])
    assert all(map(torch.equal, own, before)), "an input was changed"
    return [out.detach(), q.grad, k.grad, v.grad]


@contextmanager
def watched():
    """Note what happens: ("start", n), ("compute", pairs), ("wait", n)."""
    events, works = [], []

    def starting(call):
        def started(*args, **options):
            works.append(call(*args, **options))
            events.append(("start", len(works) - 1))
            return works[-1]

        return started

    def computing(call):
        def computed(self, source, *args):
            pairs = 0
            for rows, keys, band in self.blocks(source):
                shape = rows.stop - rows.start, keys.stop - keys.start
                pairs += int(within(band, *shape).sum())
            events.append(("compute", pairs))
            return call(self, source, *args)

        return computed

    def waiting(self, call=Work.wait):
        events.extend(("wait", index) for index, other in enumerate(works) if other is self)
        return call(self)

    with ExitStack() as stack:
        for owner, name, change in [
            (cp_comms, "exchange", starting(cp_comms.exchange)),
            (all_gather, "all_gather", starting(all_gather.all_gather)),
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


CASES = [(method, kind) for method in METHODS for kind in ("zigzag", "stripe", "contiguous")]


def behind_all():
    return {case: behind_each_message(*case) for case in CASES}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_have_computation_behind_them(size):
    for found in run_ranks(behind_all, size):
        for (method, _), behind in found.items():
            # The ring: a message a hop, forward and twice backward, of which the last gradients
            # come home behind nothing. All-gather: K and V, forward and backward.
            assert len(behind) == (3 * (size - 1) if method == "ring" else 4)
            assert sum(pairs == 0 for pairs in behind) == (method == "ring"), behind

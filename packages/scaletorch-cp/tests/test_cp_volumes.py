"""The bytes sent are those documented."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import apply_context_parallel, attention, zigzag
from scaletorch.parallel.context_parallel.models.whole_sequences import keep_whole

METHODS = ("ring", "all_gather", "ulysses", "hybrid")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LENGTH, DIM = 6, 4
COMPARISON = 24  # bytes, of what a rank was called with


def documented(method, heads, kv_heads, size, dtype):
    """Return the bytes that one of four ranks sends, by docs/context_parallel.md."""
    size = {"ulysses": 4, "hybrid": size}.get(method, 1)
    rings, head = 4 // size, 2 * LENGTH * DIM * dtype.itemsize
    q, m = heads * head, 2 * max(kv_heads, size) * head
    w = max(4 / dtype.itemsize, 1)
    swapped, around = (size - 1) / size, rings - 1
    forward = (2 * q + m) * swapped + around * m
    return forward, (q + (q + m) * w) * swapped + around * m * (1 + w)


class Counting(TorchDispatchMode):
    """Adds up what leaves this rank, at the dispatcher, which every message passes."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            size, name = dist.get_world_size(), func._schema.name
            sizes = [
                sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))
                for value in (*args, result)
            ]
            collective = max(sizes) * (size - 1) // size  # a gather, or an exchange of all with all
            self.sent += {"c10d::send": sizes[0], "c10d::recv_": 0}.get(name, collective)
        return result


def sent(method, heads, kv_heads, dtype):
    """Return the bytes that leave this rank in forward and backward."""
    shapes = [(2, h, LENGTH, DIM) for h in (heads, kv_heads, kv_heads)]
    leaves = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    size = dist.get_world_size()
    options = {"causal": True, "layout": zigzag(LENGTH * size, size)}
    with Counting() as forward:
        out = attention(*leaves, **options, method=method, group=dist.group.WORLD)
    with Counting() as backward:
        out.backward(torch.ones_like(out))
    return forward.sent - COMPARISON * (size - 1), backward.sent


def sent_around_a_state():
    """Return the bytes that leave a rank, forward and backward, for a layer that passes a state."""
    layer = nn.Conv1d(DIM, DIM, 1)
    layer.forward = lambda x: x * layer.weight.sum()
    keep_whole([layer])
    apply_context_parallel(layer, dist.new_group(), layout="zigzag")
    x = torch.ones(8, LENGTH, DIM, requires_grad=True)
    with Counting() as forward:
        out = layer(x)
    with Counting() as backward:
        out.backward(torch.ones_like(out))
    return forward.sent, backward.sent


def measured(cases):
    return sent_around_a_state(), [sent(*case) for case in cases]


def test_bytes_sent_are_those_documented():
    cases, expected = [], []
    for heads, kv_heads, size in [(4, 4, 4), (8, 2, 2), (4, 1, 1), (6, 6, 2)]:
        for dtype in DTYPES if heads == 8 else DTYPES[:1]:
            for method in METHODS:
                if method != "ulysses" or heads % 4 == 0:
                    cases.append((method, heads, kv_heads, dtype))
                    expected.append(documented(method, heads, kv_heads, size, dtype))
    of_state = 2 * 8 * LENGTH * DIM * 3 // 4 * 4
    for around_a_state, found in run_ranks(measured, 4, cases):
        assert around_a_state == (of_state, of_state)
        for case, own, wanted in zip(cases, found, expected, strict=True):
            assert own == wanted, case

"""Memory is linear in the sequence, by every method and under every mask."""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.context_parallel import attention

LENGTH, DIM, RANKS = 16_384, 16, 2
HEADS = {"ring": 1, "all_gather": 1, "ulysses": RANKS}  # "hybrid" on two ranks is one of these
MASKS = {
    "whole": lambda length: {},
    "documents": lambda length: {
        "cu_seqlens": (0, 5, *range(length // 8, length + 1, length // 8))
    },
    "window": lambda length: {"window": 500},
}
CASES = [  # a window and documents are cut alike by every method
    *(("ring", mask) for mask in MASKS), ("all_gather", "documents"), ("ulysses", "window")
]  # fmt: skip
QUIET = {"KINETO_LOG_LEVEL": "99"}  # the profiler tells of every start and stop


def peak(run):
    """Return the bytes that torch's CPU allocator handed out at most, above those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def random(heads, length):
    """Return q, k, v, the gradient of the output, and the bytes of all four."""
    tensors = [torch.randn(1, heads, length, DIM) for _ in range(4)]
    return (*tensors, sum(x.nbytes for x in tensors))


def peak_of_attention(method, length, options):
    """Return the peak of causal forward and backward, and the bytes of this rank's inputs."""
    *tensors, inputs = random(HEADS[method], length // RANKS)
    q, k, v = (x.requires_grad_() for x in tensors[:3])

    how = {"causal": True, "layout": "zigzag", "method": method, "group": dist.group.WORLD}

    def run():
        out = attention(q, k, v, **options, **how)
        out.backward(tensors[3])

    return peak(run), inputs


def of_attention():
    """Return of each case what a quarter of the length takes, and the whole."""
    return {
        (method, mask): [
            peak_of_attention(method, length, MASKS[mask](length))
            for length in (LENGTH // 4, LENGTH)
        ]
        for method, mask in CASES
    }


def of_a_ring():
    return peak_of_attention("ring", RANKS * 1024, {})[0]


def test_16k_positions_on_two_ranks():
    # The scores of one head would be 256 times the inputs on each rank.
    for found in run_ranks(of_attention, RANKS, env=QUIET, timeout=200):
        for case, ((quarter, _), (whole, inputs)) in found.items():
            assert inputs < whole < 5 * inputs, case
            # When gloo's threads let go of what they sent is a matter of chance; 16 is quadratic.
            assert whole < 6 * quarter, case


def test_a_ring_takes_no_more_on_more_ranks():
    three, five = (max(run_ranks(of_a_ring, size, env=QUIET)) for size in (3, 5))
    assert five < 1.1 * three

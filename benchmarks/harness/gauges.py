"""Costs of a call besides its time: bytes sent, time in communication, peak memory."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .turns import Run

# All communication from Python ends in one of these: methods of groups and works
# (torch renamed some of them), and operators.
METHOD = re.compile("reduce|gather|scatter|all_?to_?all|^send$|^recv$")
OPERATORS = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    "wait_tensor",
)  # fmt: skip
PLACES: list[tuple[Any, str]] = [
    *((dist.ProcessGroup, name) for name in dir(dist.ProcessGroup) if METHOD.search(name)),
    *((torch.ops._c10d_functional, name) for name in OPERATORS),
    (dist.Work, "wait"),
]
SILENT = ("barrier", "wait_tensor", "_wrap_tensor_autograd")  # operators that send no tensor
TWICE = ("allreduce_", "all_reduce")  # a reduce_scatter and an all_gather
DIRECT = {"send": 1, "recv_": 0}  # times that a message counts as sent


class _Count(TorchDispatchMode):
    """Sums the bytes that each collective sends, at the dispatcher, which all collectives pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if DTensor in types:  # the resulting plain call comes here again
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and name not in SILENT:
            whole = max(map(_bytes, (*args, result)))
            passes, size = 2 if name in TWICE else 1, dist.get_world_size()
            direct = DIRECT.get(name)
            self.sent += passes * whole * (size - 1) // size if direct is None else direct * whole
        return result


def _bytes(value: object) -> int:
    """Return the bytes of a tensor, or of all tensors in lists."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sent(run: Run) -> int:
    """Return the bytes that this rank sends in a call if each collective is a ring of all ranks.

    On n ranks, all_gather, reduce_scatter and all_to_all of B bytes (the larger of input and
    output) send B (n - 1) / n; all_reduce sends twice that, on two ranks B.
    """
    count = _Count()
    with count:
        run()
    return count.sent


def exposed(run: Run) -> float:
    """Return the seconds of a call that this thread spends in communication or waits for it."""
    spent = 0.0

    def timed(call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent += time.perf_counter() - start
            return result

        return wrapper

    with ExitStack() as stack:
        for owner, name in PLACES:
            change = mock.patch.object(owner, name, timed(getattr(owner, name)))
            stack.enter_context(change)
        dist.barrier()
        spent = 0.0  # discard the barrier's time
        run()
    return spent


def peak(run: Run) -> int:
    """Return the peak bytes of tensors in a call, above those from before it.

    It counts memory from torch's CPU allocator, without gloo's buffers.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most

"""What ranks keep for backward, and what they hold at their peak."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

from scaletorch.compose import train_step
from scaletorch.models.mixture import Router
from scaletorch.parallel.data_parallel.buckets.bucket import Bucket
from scaletorch.parallel.data_parallel.buckets.manager import BucketManager
from scaletorch.parallel.pg_manager import ProcessGroupManager

from .drawing import Case
from .ranks import batch_of, held, on_grid, prepared, step


class Kept(saved_tensors_hooks):
    """The most bytes that autograd keeps at a time; each memory counts once, parameters do not.

    Args:
        model: Whose parameters are no activations.

    Attributes:
        most: Bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, lambda held: held.tensor)
        self.most = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._users = Counter[int]()
        self._now = 0

    def _pack(self, tensor: Tensor) -> Any:
        return _Held(tensor, self)

    def change(self, at: int, size: int, users: int) -> None:
        """Count so many more users of memory."""
        if at not in self._parameters:
            before, after = self._users[at], self._users[at] + users
            self._users[at] = after
            self._now += size * ((after > 0) - (before > 0))
            self.most = max(self.most, self._now)


class _Held:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor, self._kept = tensor, kept
        storage = tensor.untyped_storage()
        self._memory = storage.data_ptr(), storage.nbytes()
        kept.change(*self._memory, 1)

    def __del__(self) -> None:
        self._kept.change(*self._memory, -1)


class Peak(NamedTuple):
    """Bytes of a rank in a step.

    Attributes:
        held: Of parameters, gradients and the optimizer's state, before a step.
        taken: The most that the allocator gave beside that.
        rest: What it did not get back: gloo's threads hold tensors until their next call.
    """

    held: list[int]
    taken: int
    rest: int


def peaks(cases: list[Case]) -> list[Peak]:
    """Run cases on this rank among others; return what it holds at its peak in each."""
    return [on_grid(case, _peak) for case in cases]


def _peak(case: Case, manager: ProcessGroupManager) -> Peak:
    model, optimizer = prepared(case, manager)
    for _ in range(2):  # the second fills the buckets that the first one has found
        step(case, model, optimizer, manager)
    optimizer.zero_grad()
    for buckets in model.bucket_managers:
        _take_turns(buckets)
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(_share_out)
    state = held(model, optimizer)
    batch = batch_of(case, manager)

    def train() -> None:
        train_step(model, batch, manager)
        optimizer.zero_grad()

    return Peak(state, *most_taken(train))


def most_taken(train: Callable[[], None]) -> tuple[int, int]:
    """Return the most that the allocator gives meanwhile, and what it does not get back."""
    gc.collect()  # what models before it left behind would count as given back in this step
    with profile(profile_memory=True) as profiled:
        train()
    events = profiled.profiler.kineto_results.events()
    taken = [*accumulate(event.nbytes() for event in events if event.name() == "[memory]")]
    return max(taken), max(taken[-1], 0)


def _share_out(router: Router, _: object, output: tuple[Tensor, Tensor]) -> None:
    """Have tokens go to experts in turn, evenly as a plan takes them to be shared out."""
    index_TK = output[0].data  # autograd, which keeps it, need not know
    turns = torch.arange(index_TK.numel()).remainder_(len(router.weight))
    index_TK.copy_(turns.view_as(index_TK))


def _take_turns(buckets: BucketManager) -> None:
    """Sum each bucket by when the next one leaves, as a plan has it, whatever else is under way."""
    launch = buckets._launch

    def launched(bucket: Bucket) -> None:
        before, buckets._in_flight = buckets._in_flight, Later()
        launch(bucket)
        for each in before:
            each.wait()
            each.collect_if_done()

    buckets._in_flight, buckets._launch = Later(), launched


class Later(list):
    """Buckets under way, at which nobody looks before the next one leaves."""

    def __bool__(self) -> bool:
        return False

"""Random numbers under tensor parallelism: one common stream, and one per rank for shards.

Ranks of the axis share a seed, so their default generators are one common stream. A module that
works on shards (attention over this rank's heads) must draw from a stream of its own rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import get_rank, get_world_size
from ....dist.errors import StateError
from ...pg_manager import axis_group, describe_rank
from ...pg_manager.building import around_compiled, uncompiled
from .sequence_shares import in_backward
from .surround import Surrounded

States = tuple[Tensor, Tensor | None]  # of the CPU generator and the accelerator's

# State of the common stream while a rank's own stream is in use, else None.
_common: ContextVar[States | None] = ContextVar("_common", default=None)


@contextmanager
@around_compiled
def sharded_random(group: ProcessGroup | None = None) -> Iterator[None]:
    """Run the body with this rank's own random stream, on the CPU and the accelerator.

    Its seed is drawn from torch's default CPU generator, which advances equally on all ranks. So
    recomputation by `torch.utils.checkpoint`, which restores that generator, draws the same numbers
    again. A row-parallel layer in the body ends the stream early, since its output is replicated.
    With one rank nothing is drawn and nothing changes.

    Args:
        group: Ranks of the tensor-parallel axis; None means that axis of the current manager.

    Example:
        >>> with sharded_random():
        ...     hidden = dropout(column_parallel(x))
    """
    group = axis_group("tp") if group is None else group
    size = get_world_size(group)
    if size == 1:
        yield
        return
    seeds = torch.randint(2**63 - 1, (size,), device="cpu").tolist()  # one for each rank
    outer, before = _common.get(), _states()
    _common.set(before if outer is None else outer)
    _seed(seeds[get_rank(group)])
    try:
        yield
    finally:
        if outer is None:
            end_sharded_random()
        elif _common.get() is not None:  # else a row-parallel layer ended the outer one too
            _set_states(before)


@contextmanager
@around_compiled
def common_random() -> Iterator[None]:
    """Run the body with the common random stream, also inside `sharded_random`."""
    common = _common.get()
    if common is None:
        yield
        return
    state = _states()
    end_sharded_random()
    try:
        yield
    finally:
        _common.set(_states())
        _set_states(state)


@contextmanager
@around_compiled
def refused_again(name: str) -> Iterator[None]:
    """Refuse draws from the common stream in recomputation, which restores only ranks' streams."""
    again = in_backward() and _common.get() is None
    before = _states() if again else None
    try:
        yield
    finally:  # the checkpoint may stop the body early by its own exception
        pairs = [] if before is None else zip(before, _states(), strict=True)
        # None: the accelerator was not in use, so nothing was drawn on it.
        if any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs):
            raise StateError(
                f"{describe_rank()}: {name} sees whole sequences and draws at random (dropout); "
                "computed again in backward it would draw something else: set its dropout to 0, or "
                "do without recomputation or without sequence parallelism"
            )


@uncompiled
def end_sharded_random() -> None:
    """Switch back to the common stream if this rank's own stream is in use."""
    common = _common.get()
    if common is not None:
        _set_states(common)
        _common.set(None)


class ShardedRandom(Surrounded):
    """A module that works on shards: in training it uses this rank's own random stream."""

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with sharded_random(self._tp_group) if self.training else nullcontext():
            return super().forward(*args, **kwargs)


class CommonRandom(Surrounded):
    """A module inside a `ShardedRandom` one that works on replicated activations."""

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with common_random():
            return super().forward(*args, **kwargs)


def _accelerator() -> Any:
    """Return torch's module of the accelerator in use, or None if there is only the CPU."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    # Do not initialise an unused accelerator: nothing draws on it.
    return module if getattr(module, "is_initialized", lambda: True)() else None


@uncompiled
def _states() -> States:
    accelerator = _accelerator()
    return torch.get_rng_state(), None if accelerator is None else accelerator.get_rng_state()


@uncompiled
def _set_states(states: States) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        _accelerator().set_rng_state(states[1])


@uncompiled
def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    accelerator = _accelerator()
    if accelerator is not None:
        accelerator.manual_seed(seed)

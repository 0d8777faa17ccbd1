"""Hidden states on their way through an unmodified forward: found in it, and found untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank


def tensor_of(value: Any) -> Tensor:
    """Return the tensor that carries the result of a module: itself, or the first in a container.

    Raises:
        InvalidArgumentError: there is none.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for entry in value:
            if isinstance(entry, Tensor):
                return entry
    message = f"{describe_rank()}: expected a module to return a tensor, got {type(value).__name__}"
    raise InvalidArgumentError(message)


class HiddenFlow:
    """Checks that the model's own code hands hidden states on unchanged around a stage's layers.

    Every stage runs the model's whole forward, with the modules of other stages left out. Code that
    changes the hidden states outside these modules (a scale, a dropout, an added position) would so
    run once on every stage instead of once. Two comparisons for each forward find it.

    Args:
        layers: this stage's layers in order.
        first: whether nothing before the layers has been left out.
        last: whether nothing after the layers has been left out.
    """

    def __init__(self, layers: Sequence[nn.Module], *, first: bool, last: bool) -> None:
        self._received: Any = None
        self._left: Tensor | None = None
        self._watching = False
        if not first:
            layers[0].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if not last:
            layers[-1].register_forward_hook(self._leave)

    def start(self, received: Any) -> None:
        """Take note of what the stage's forward is called with."""
        self._received, self._watching = received, True

    def finish(self, output: Any) -> None:
        """Check what the stage's forward returned."""
        left = self._left
        self.reset()
        if left is not None and not _same(left, tensor_of(output)):
            raise InvalidArgumentError(_message("after the last layer", "last"))

    def reset(self) -> None:
        """Forget the forward that is running."""
        self._received = self._left = None
        self._watching = False

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Only the first call counts: a layer may be shared by several places, and it may be
        # recomputed during the backward of another micro-batch.
        received, self._received = self._received, None
        if isinstance(received, Tensor) and not _same(received, tensor_of(args or kwargs)):
            raise InvalidArgumentError(_message("before the first layer", "first"))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._watching:
            self._left = tensor_of(output)


def _same(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr() and a.dtype == b.dtype:
        return True
    return torch.equal(a.detach(), b.detach().to(a.dtype))


def _message(where: str, part: str) -> str:
    return (
        f"{describe_rank()}: the model's forward changes the hidden states {where} of this stage, "
        "in code or modules that every stage runs, so it would happen once per stage; put it into "
        f"a module and name that in Split({part}=...), or into the layers (a residual around them)"
    )

"""Hidden states on their way through an unmodified forward: found in it, and found untouched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden, is_hidden, tensors_in
from .cut import Passage


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
    """Checks that the model's own code hands hidden states on unchanged around a stage's modules.

    Every stage runs the model's whole forward, with the modules of other stages left out. Code that
    changes the hidden states outside these modules (a scale, a dropout, an added position) would so
    run once on every stage instead of once. Two comparisons for each forward find it.

    Args:
        stage: which stage.
        entry: its first module; None where nothing before it has been left out.
        exit: its last module; None where nothing after it has been left out.
        passage: the forward that runs it.
    """

    def __init__(
        self, stage: int, entry: nn.Module | None, exit: nn.Module | None, passage: Passage
    ) -> None:
        self._stage, self._passage = stage, passage
        self._received: Any = None
        self._left: Any = None
        self._versions: list[int] = []  # of what was received, and then of what was left
        if entry is not None:
            entry.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if exit is not None:
            exit.register_forward_hook(self._leave)

    def start(self, received: Any) -> None:
        """Take note of what the stage's forward is called with."""
        self._received, self._versions = received, _versions(received)
        self._passage.active, self._passage.furthest = True, 0

    def passed_on(self, output: Any) -> Hidden:
        """Return what a stage that is not the last passes on, out of what its forward returned.

        That is what its last module returned: a tensor, or a container of tensors alone.

        Raises:
            InvalidArgumentError: The forward returned something else.
        """
        left, versions = self._left, self._versions
        self.reset()
        if left is None:  # the module was not called: there is nothing to compare with
            hidden: Hidden = output if is_hidden(output) else tensor_of(output)
            return hidden
        if versions != _versions(left):
            raise InvalidArgumentError(_message("after the last layer", "last"))
        if output is left and isinstance(output, Tensor):  # by far the most frequent case
            return output
        if is_hidden(left) and type(output) is type(left) and _same(left, output):
            hidden = output
            return hidden
        if output is left and not isinstance(left, Tensor) and len(left) > 1:
            raise InvalidArgumentError(
                f"{describe_rank()}: layers must pass on a tensor, or a tuple, list or dict of "
                f"tensors alone, got a {type(left).__name__} with something else in it, or of a "
                "class of its own; leave that out, or put it into a tensor"
            )
        carrier = tensor_of(output)
        if not _same(tensor_of(left), carrier):
            raise InvalidArgumentError(_message("after the last layer", "last"))
        _refuse_collected(output, carrier)
        return carrier

    def reset(self) -> None:
        """Forget the forward that is running."""
        self._received = self._left = None
        self._passage.active = False

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Only the first call counts: a layer may be shared by several places, and it may be
        # recomputed during the backward of another micro-batch.
        received, self._received = self._received, None
        if self._passage.active:
            self._passage.reach(self._stage, f"{type(module).__name__} begins stage {self._stage}")
        if received is None:
            return
        if any(entry is received for entry in (*args[1:], *kwargs.values()) if args):
            raise InvalidArgumentError(
                f"{describe_rank()}: the first layer of this stage is given the hidden states "
                "twice: what it takes beside them, such as the embedding's output, would be "
                "another tensor in one process; let layers pass it on, with the hidden states in "
                "one tuple"
            )
        if self._versions != _versions(received):
            raise InvalidArgumentError(_message("before the first layer", "first"))
        given: Any = args[0] if args else next(iter(kwargs.values()), None)
        if given is received:
            return
        if is_hidden(received):
            if not is_hidden(given) or not _same(received, given):
                raise InvalidArgumentError(_message("before the first layer", "first"))
        elif isinstance(received, Tensor) and not _same(received, tensor_of(args or kwargs)):
            raise InvalidArgumentError(_message("before the first layer", "first"))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._passage.active:
            self._left, self._versions = output, _versions(output)


def _versions(value: Any) -> list[int]:
    """Return numbers that change when tensors are changed in place."""
    tensors = tensors_in(value) if isinstance(value, Tensor) or is_hidden(value) else []
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _refuse_collected(output: Any, carrier: Tensor) -> None:
    """Refuse tensors to train by, beside the hidden states: they would end on this stage."""
    entries = output.values() if isinstance(output, Mapping) else output
    for entry in () if isinstance(output, Tensor) else entries:
        if isinstance(entry, Tensor) and entry.requires_grad and not _same_tensor(entry, carrier):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward returns a tensor with a gradient of shape "
                f"{tuple(entry.shape)} beside the hidden states, made by this stage's layers alone "
                "(such as an auxiliary loss): it would be lost here; let layers pass it on, with "
                "the hidden states in one tuple"
            )


def _same(a: Hidden, b: Hidden) -> bool:
    ours, theirs = tensors_in(a), tensors_in(b)
    return len(ours) == len(theirs) and all(map(_same_tensor, ours, theirs))


def _same_tensor(a: Tensor, b: Tensor) -> bool:
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

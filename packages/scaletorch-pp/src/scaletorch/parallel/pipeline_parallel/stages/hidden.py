"""Hidden states on their way through an unmodified forward: found in it, and found untouched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....dist.errors import InvalidArgumentError
from ..runtime.forms import Hidden, is_hidden, tensors_in
from .compare import (
    changed_message,
    collected_message,
    gradient_message,
    handed_on,
    refuse_changed,
    tensor_of,
    tensors_of,
)
from .cut import Passage
from .examination import Examination, main_argument
from .gradient import hands_on_gradients, hooks_on, trained_beside


class HiddenFlow:
    """Checks that the model's own code hands hidden states on unchanged around a stage's modules.

    Every stage runs the model's whole forward, with the modules of other stages left out. Code that
    changes the hidden states between these modules (a scale, a dropout, an added position), or
    their gradients, would so run once on every stage instead of once. What stands before a stage's
    first module is compared in each forward; what comes after the last one is the next stage's to
    compare, and the last one's to do.

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
        self._hooks = 0  # on what was left
        self._copy: Any = None  # what the entry has been given
        self._copies = False  # whether the entry writes to what it is given
        if entry is not None:
            entry.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if exit is not None:
            exit.register_forward_hook(self._leave)

    def start(self, received: Any, examination: Examination | None = None) -> None:
        """Take note of what the stage's forward is called with, and of what examines it."""
        self._received, self._versions = received, _versions(received)
        passage = self._passage
        passage.active, passage.furthest = True, 0
        passage.received, passage.examined = received, examination

    def passed_on(self, output: Any) -> Hidden:
        """Return what a stage that is not the last passes on, out of what its forward returned.

        That is what its last module returned: a tensor, or a container of tensors alone.

        Raises:
            InvalidArgumentError: The forward returned something else.
        """
        examination = self._passage.examined
        if self._left is None and examination is not None:  # its last module is skipped
            self._leave(None, (), examination.left)
        left, versions, hooks = self._left, self._versions, self._hooks
        if left is None:  # there is nothing to compare with
            hidden: Hidden = output if is_hidden(output) else tensor_of(output)
            return hidden
        if versions != _versions(left):
            raise InvalidArgumentError(changed_message("after the last layer", "last"))
        hidden = handed_on(left, output)
        if hooks != hooks_on(_tensors(left)):
            raise InvalidArgumentError(gradient_message("after the last layer", "last"))
        if examination is not None:
            self._refuse_trained_beside(examination, output, hidden)
        return hidden

    def reset(self) -> None:
        """Forget the forward that is running."""
        if self._copy is not None:
            self._copies = self._copies or any(_versions(self._copy))
        self._received = self._left = self._copy = None
        passage = self._passage
        passage.active, passage.received, passage.examined = False, None, None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Only the first call counts: a layer may be shared by several places, and it may be
        # recomputed during the backward of another micro-batch.
        received, self._received = self._received, None
        if self._passage.active:
            self._passage.reach(self._stage, f"{type(module).__name__} begins stage {self._stage}")
        if received is None:
            return None
        main = main_argument(args, kwargs, received)
        given: Any = kwargs[main] if main in kwargs else args[int(main)] if args else None
        if self._versions != _versions(received):
            raise InvalidArgumentError(changed_message("before the first layer", "first"))
        if given is not received:
            refuse_changed(given, received)
        if torch.is_grad_enabled():
            self._compare_gradients(given, received)
        if self._passage.examined is None and not self._copies:
            return None
        # What the layer makes of it must not count as hidden states; and it may write to it.
        self._copy = copy = _copied(given)
        args = tuple(copy if str(place) == main else arg for place, arg in enumerate(args))
        return args, {name: copy if name == main else value for name, value in kwargs.items()}

    def _compare_gradients(self, given: Any, received: Any) -> None:
        """Refuse code that changes the gradients of hidden states and leaves their values.

        Raises:
            InvalidArgumentError: There is such code.
        """
        theirs = _tensors(received)
        changed = bool(hooks_on(theirs))
        if given is not received:
            ours = _tensors(given) if is_hidden(received) else [tensor_of(given)]
            changed |= [t.requires_grad for t in ours] != [t.requires_grad for t in theirs]
            if not changed and self._passage.examined is not None:
                beside = trained_beside(ours, theirs)
                changed = bool(beside) or not hands_on_gradients(ours, theirs)
        if changed:
            raise InvalidArgumentError(gradient_message("before the first layer", "first"))

    def _refuse_trained_beside(self, examination: Examination, output: Any, hidden: Hidden) -> None:
        own = {id(leaf) for leaf in examination.leaves()}
        for tensor in tensors_of(output):
            if any(id(leaf) in own for leaf in trained_beside([tensor], tensors_in(hidden))):
                raise InvalidArgumentError(collected_message(tensor))

    def _leave(self, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        if self._passage.active:
            self._left, self._versions = output, _versions(output)
            self._hooks = hooks_on(_tensors(output))


def _copied(hidden: Any) -> Any:
    """Return hidden states in other memory; what is not hidden states as it is."""
    if isinstance(hidden, Tensor):
        return hidden.clone()
    if not is_hidden(hidden):
        return hidden
    if isinstance(hidden, dict):
        return {name: tensor.clone() for name, tensor in hidden.items()}
    return type(hidden)(tensor.clone() for tensor in hidden)


def _tensors(value: Any) -> list[Tensor]:
    return tensors_in(value) if isinstance(value, Tensor) or is_hidden(value) else []


def _versions(value: Any) -> list[int]:
    """Return numbers that change when tensors are changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in _tensors(value)]

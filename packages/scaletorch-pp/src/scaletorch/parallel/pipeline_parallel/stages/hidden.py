"""Hidden states on their way through an unmodified forward: found in it, and found untouched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import (
    Hidden,
    is_hidden,
    main_argument,
    tensor_of,
    tensors_of,
)
from .cut import Passage
from .gates import Gates
from .gradient import hands_on_gradients, trained_beside
from .stand_ins import plain


class HiddenFlow:
    """Checks that the model's own code hands hidden states on unchanged around a stage's modules.

    Every stage runs the model's whole forward, with the modules of other stages left out. Code that
    changes the hidden states between these modules (a scale, a dropout, an added position), or
    their gradients, would so run once on every stage instead of once. Code before a stage's first
    module is checked in each forward; code after its last module is the next stage's to check, and
    the last stage's to run.

    Args:
        stage: The stage.
        entry: Its first module; None if nothing before it has been left out.
        exit: Its last module; None if nothing after it has been left out.
        passage: The forward that runs it.

    Attributes:
        gates: What keeps other stages' tensors out of its modules.
    """

    def __init__(
        self, stage: int, entry: nn.Module | None, exit: nn.Module | None, passage: Passage
    ) -> None:
        self._stage, self._passage = stage, passage
        self.gates = Gates(passage, self._check_untouched, last=exit is None)
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

    def start(self, received: Any, ids: Any, *, examined: bool, followed: bool) -> None:
        """Begin a forward, as `Passage.start`."""
        self._received = received
        self.gates.start()
        self._passage.start(received, ids, examined=examined, followed=followed)
        self._versions = _versions(self._passage.received)

    def passed_on(self, output: Any) -> Hidden:
        """Return the hidden states that a stage but the last passes on, out of its output.

        They are the output of its last module: a tensor, or a container of tensors alone.

        Raises:
            InvalidArgumentError: The forward returned something else.
        """
        passage = self._passage
        passage.over = True
        if self._left is None and passage.left is not None:  # its last module is skipped
            self._leave(None, (), passage.left)
        left, versions, hooks = self._left, self._versions, self._hooks
        if left is None:  # there is nothing to compare with
            hidden: Hidden = plain(output) if is_hidden(output) else plain(tensor_of(output))
            return hidden
        if versions != _versions(left):
            raise InvalidArgumentError(_changed_message("after the last layer", "last"))
        hidden = _handed_on(left, output)
        if hooks != _hooks_on(_tensors(left)):
            raise InvalidArgumentError(_gradient_message("after the last layer", "last"))
        self._refuse_trained_beside(output, hidden)
        return hidden

    def reset(self) -> None:
        """Forget the forward that is running."""
        if self._copy is not None:
            self._copies = self._copies or any(_versions(self._copy))
        self._received = self._left = self._copy = None
        self._passage.reset()

    def _check_untouched(self) -> None:
        """Check that the model's own code has not written to what it was given, nor hooked it."""
        received = self._passage.received
        if self._versions != _versions(received):
            raise InvalidArgumentError(_changed_message("before the first layer", "first"))
        if torch.is_grad_enabled() and _hooks_on(_tensors(received)):
            raise InvalidArgumentError(_gradient_message("before the first layer", "first"))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Only the first call counts: a layer may be shared by several places, and it may be
        # recomputed during the backward of another micro-batch.
        received, self._received = self._received, None
        if self._passage.active:
            self._passage.reach(self._stage, f"{type(module).__name__} begins stage {self._stage}")
        if received is None:
            return None
        main = main_argument(args, kwargs, received)
        came: Any = kwargs[main] if main in kwargs else args[int(main)] if args else None
        # A first module that changes nothing has no gate; the compiler sees no stand-ins.
        given = came if torch.compiler.is_compiling() else self._passage.opened(came)
        if given is not received:
            _refuse_changed(given, received)
            if torch.is_grad_enabled():
                self._compare_gradients(given, received)
        # What is given may be written to: whether it is, the first forward of a kind tells.
        if self._passage.examined or self._copies:
            given = self._copy = _copied(given)
        if given is came:
            return None
        args = tuple(given if str(place) == main else arg for place, arg in enumerate(args))
        return args, {name: given if name == main else value for name, value in kwargs.items()}

    def _compare_gradients(self, given: Any, received: Any) -> None:
        """Refuse code that changes the gradients of hidden states and leaves their values.

        Raises:
            InvalidArgumentError: There is such code.
        """
        theirs = _tensors(received)
        ours = _tensors(given) if is_hidden(received) else [tensor_of(given)]
        changed = [t.requires_grad for t in ours] != [t.requires_grad for t in theirs]
        if not changed and not torch.compiler.is_compiling():
            passage = self._passage
            over, passage.over = passage.over, True  # the trial is no code of the model's
            changed = bool(trained_beside(ours, theirs)) or not hands_on_gradients(ours, theirs)
            passage.over = over
        if changed:
            raise InvalidArgumentError(_gradient_message("before the first layer", "first"))

    def _refuse_trained_beside(self, output: Any, hidden: Hidden) -> None:
        passed = list(tensors_in(hidden))
        for tensor in tensors_of(output):
            leaves = {id(leaf) for leaf in trained_beside([tensor], passed)}
            own = leaves and map(id, (*self.gates.parameters(), *_tensors(self._passage.origin)))
            if not leaves.isdisjoint(own):
                skips = tensor is output and not _same_tensor(tensor, passed[0])
                raise InvalidArgumentError(
                    _skipped_message() if skips else _collected_message(tensor)
                )

    def _leave(self, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        if self._passage.active:
            self._left, self._versions = output, _versions(output)
            self._hooks = _hooks_on(_tensors(output))


def _handed_on(left: Any, output: Any) -> Hidden:
    """Return the hidden states that the forward hands on of its last module's output.

    A tensor may have been computed with since: between layers the next stage would refuse that, and
    code after the last layer counts on the last stage alone.

    Raises:
        InvalidArgumentError: None that can be told, or tensors beside it.
    """
    if output is left and isinstance(output, Tensor):  # by far the most frequent case
        return output
    if is_hidden(left) and type(output) is type(left) and _same(left, output):
        hidden: Hidden = left
        return hidden
    if output is left and not isinstance(left, Tensor) and len(left) > 1:
        raise InvalidArgumentError(
            f"{describe_rank()}: layers must pass on a tensor, or a tuple, list or dict of "
            f"tensors alone, got a {type(left).__name__} with something else in it, or of a "
            "class of its own; leave that out, or put it into a tensor"
        )
    carrier, first = tensor_of(output), tensor_of(left)
    if first is not left and not _same(first, carrier):
        raise InvalidArgumentError(_changed_message("after the last layer", "last"))
    _refuse_collected(output, carrier)
    return first


def _refuse_changed(given: Any, received: Any) -> None:
    """Refuse hidden states that are not those which a stage has received.

    Raises:
        InvalidArgumentError: They are others.
    """
    if is_hidden(received):
        changed = not is_hidden(given) or not _same(received, given)
    else:
        changed = isinstance(received, Tensor) and not _same(received, tensor_of(given))
    if changed:
        raise InvalidArgumentError(_changed_message("before the first layer", "first"))


def _refuse_collected(output: Any, carrier: Tensor) -> None:
    """Refuse tensors to train by, beside the hidden states: they would end on this stage.

    Raises:
        InvalidArgumentError: There is one.
    """
    for entry in [] if isinstance(output, Tensor) else tensors_of(output):
        if entry.requires_grad and not _same_tensor(entry, carrier):
            raise InvalidArgumentError(_collected_message(entry))


def _same(a: Hidden, b: Hidden) -> bool:
    ours, theirs = list(tensors_in(a)), list(tensors_in(b))
    return len(ours) == len(theirs) and all(map(_same_tensor, ours, theirs))


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr() and a.dtype == b.dtype:
        return True
    return torch.equal(a.detach(), b.detach().to(a.dtype))


def _changed_message(where: str, part: str) -> str:
    """Say that values change."""
    return (
        f"{describe_rank()}: the model's forward changes the hidden states {where} of this stage, "
        "in code or modules that every stage runs, so it would happen once per stage; put it into "
        f"a module and name that in Split({part}=...), or into the layers (a residual around them)"
    )


def _gradient_message(where: str, part: str) -> str:
    """Say that gradients change."""
    return (
        f"{describe_rank()}: the model's forward changes the gradient of hidden states {where} of "
        "this stage, and not their values (detach, a hook, a factor taken back by a detached copy, "
        "a parameter of zeros or ones), in code that every stage runs, so it would happen once per "
        f"stage; put it into a module and name that in Split({part}=...), or into the layers"
    )


def _collected_message(tensor: Tensor) -> str:
    """Say that a tensor to train by would be lost."""
    return (
        f"{describe_rank()}: the model's forward returns a tensor with a gradient of shape "
        f"{tuple(tensor.shape)} beside the hidden states, made by this stage's layers alone "
        "(such as an auxiliary loss): it would be lost here; let layers pass it on, with "
        "the hidden states in one tuple"
    )


def _skipped_message() -> str:
    """Say that the output of a layer goes past the layers of other stages."""
    return (
        f"{describe_rank()}: the model's forward computes, after the last layer of this stage, "
        "with what an earlier one returned (a skip connection), which other stages have not; let "
        "layers pass it on, with the hidden states in one tuple"
    )


def _copied(hidden: Any) -> Any:
    """Return hidden states in other memory, and any other value as it is."""
    if isinstance(hidden, Tensor):
        return hidden.clone()
    if not is_hidden(hidden):
        return hidden
    if isinstance(hidden, dict):
        return {name: tensor.clone() for name, tensor in hidden.items()}
    return type(hidden)(tensor.clone() for tensor in hidden)


def _tensors(value: Any) -> list[Tensor]:
    return list(tensors_in(value)) if isinstance(value, Tensor) or is_hidden(value) else []


def _versions(value: Any) -> list[int]:
    """Return numbers that change when tensors are changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in _tensors(value)]


def _hooks_on(tensors: Iterable[Tensor]) -> int:
    """Count the hooks that change or see the gradients of tensors."""
    return sum(len(tensor._backward_hooks or ()) for tensor in tensors)

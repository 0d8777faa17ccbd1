"""Hidden states on their way out of an unmodified forward: what a stage passes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden, is_hidden, strangers
from .gates import Gates
from .passage import Passage, versions


class HiddenFlow:
    """Takes what a stage's last module returns, and checks that nothing else goes out of it.

    Every stage runs the model's whole forward, with the modules of other stages left out. What
    follows a stage's last module is the next stage's to compute, and nothing here comes of it. If
    it writes to hidden states, or changes their gradient, it is given a copy of what is passed on;
    that the first forward of a kind finds. What it collects for the model's output, such as
    auxiliary losses of layers, would be lost.

    Args:
        stage: The stage.
        last: Whether it is the model's last stage.
        passage: The forward that runs it.

    Attributes:
        gates: What keeps other stages' tensors out of its modules.
    """

    def __init__(self, stage: int, passage: Passage, *, last: bool) -> None:
        self._stage, self._passage = stage, passage
        self.gates = Gates(passage, stage, None if last else self._leave)
        self._left: Any = None
        self._versions: list[int] = []  # of what was left
        self._hooks = 0  # on what was left
        self._visits = 0  # of the last module
        self._copy: Any = None  # of what was left, for the model's code
        self._copies = self._own_gradients = False

    def passed_on(self, output: Any) -> Hidden:
        """Return what a stage but the last passes on: the output of its last module.

        Args:
            output: What the model's forward has returned; None if it did not come to its end.

        Raises:
            InvalidArgumentError: It was changed, cannot be passed on, or is not all of it.
        """
        passage = self._passage
        passage.over = True
        if self._left is None:  # its last module is left out, or all of them are
            left = passage.source[1] if passage.left is None else passage.left
            if left is None:
                raise InvalidArgumentError(
                    f"{describe_rank()}: the model's forward has called no module of the first "
                    "stage, so there is nothing to pass on; take fewer stages, or name the "
                    "modules that it calls in Split(...)"
                )
            self._take(left)
        left = self._left
        if self._own_gradients:
            self._refuse_collected(output, left, _reversible_message)
        if not is_hidden(left):
            raise InvalidArgumentError(_stranger_message(left))
        if self._versions != versions(left):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward changes, in place, the hidden states "
                "after the last layer of this stage, which have been passed on as they were; let "
                "it make new ones, or put that into the layers"
            )
        if self._hooks != _hooks_on(tensors_in(left)):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward changes the gradient of hidden states "
                "after the last layer of this stage by a hook, so it would happen on two stages; "
                "put it into the layers"
            )
        self._refuse_collected(output, left, _collected_message)
        hidden: Hidden = passage.beside.leave(
            left, max(self._visits, 1), self.gates.other_samples()
        )
        return hidden

    def reset(self) -> None:
        """Forget the forward that is running."""
        copied = self._copy is not None
        self._copies |= copied and (
            any(versions(self._copy)) or _hooks_on(tensors_in(self._copy)) > 0
        )
        self._left, self._copy, self._visits, self._own_gradients = None, None, 0, False
        self._passage.reset()

    def _refuse_collected(self, output: Any, left: Any, message: Callable[[Tensor], str]) -> None:
        """Refuse an output that depends on this stage's parameters by another way than `left`.

        Raises:
            InvalidArgumentError: It does.
        """
        passed = [*tensors_in(left), *self._passage.beside.tensors()]
        own: set[int] | None = None
        for tensor in tensors_in(output):
            leaves = {id(leaf) for leaf in _trained_beside([tensor], passed)}
            if leaves and own is None:
                received = tensors_in(self._passage.source[1])
                own = {*map(id, self.gates.parameters()), *map(id, received)}
            if own is not None and not leaves.isdisjoint(own):
                raise InvalidArgumentError(message(tensor))

    def _leave(self, output: Any) -> Any:
        """Take what a call of the last module returned; return what the model's code gets."""
        passage = self._passage
        if not passage.active or passage.source[0] != self._stage:
            return output
        self._take(output)
        self._visits += 1
        # Reentrant recomputation runs a layer without gradients, and then gives its output one.
        self._own_gradients = torch.is_grad_enabled() != passage.gradients
        copies = (passage.examined or self._copies) and not self._own_gradients
        if not copies or not is_hidden(output):
            return output
        self._copy = map_tensors(Tensor.clone, output)
        return self._copy

    def _take(self, output: Any) -> None:
        self._left, self._versions = output, versions(output)
        self._hooks = _hooks_on(tensors_in(output))
        self._copy, self._own_gradients = None, False


def _stranger_message(left: Any) -> str:
    kinds = ", ".join(sorted({type(each).__name__ for each in strangers(left)})) or "no tensor"
    inside = "" if kinds == type(left).__name__ else f" with {kinds} in it"
    return (
        f"{describe_rank()}: layers must pass on a tensor, or tuples, lists or dicts of tensors, "
        f"numbers, strings and None, got a {type(left).__name__}{inside}; leave that out, or put "
        "it into a tensor"
    )


def _reversible_message(tensor: Tensor) -> str:
    return (
        f"{describe_rank()}: the model's forward runs its layers in an autograd function that "
        "computes their gradients itself, as reversible layers do, so that no stage can compute "
        "those of its own: use no pipeline (pp_size=1), or layers that autograd follows"
    )


def _collected_message(tensor: Tensor) -> str:
    """Say that a tensor to train by would be lost."""
    return (
        f"{describe_rank()}: the model's forward returns a tensor with a gradient, of shape "
        f"{tuple(tensor.shape)}, that comes of this stage's layers by another way than what the "
        "last of them returns (an auxiliary loss, a skip connection): it would be lost here; let "
        "layers pass it on, with the hidden states in one tuple"
    )


def _hooks_on(tensors: Iterable[Tensor]) -> int:
    """Count the hooks that change or see the gradients of tensors."""
    return sum(len(tensor._backward_hooks or ()) for tensor in tensors)


def _trained_beside(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves, mostly parameters, that outputs depend on not through inputs."""
    nodes = _between(outputs, inputs)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _between(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the nodes of the graph from outputs back to inputs, or to leaves."""
    seen = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    todo = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions if following is not None]

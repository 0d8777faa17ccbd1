"""A forward of a stage: the values it received, its progress, and the values it passes on.

Besides hidden states a stage may pass on extra tensors that modules of later stages take: the
embedding's output, a condition embedded once for all layers, a skip connection. A stage runs the
model's whole forward, so it sees the calls of other stages' modules with the arguments that it has
computed for them. Arguments that depend on its own modules exist nowhere else, so they are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Form, Hidden, Passed, Place, is_hidden, strangers
from .stand_ins import StandIn


@dataclass(slots=True)
class Findings:
    """Facts about a kind of forward: the first one finds them, and later ones rely on them."""

    places: set[Place] = field(default_factory=set)  # arguments of later stages' modules to send
    writes: bool = False  # whether the model's code writes to received hidden states in place


class Passages:
    """The forwards of a rank's stages, with the modules `names` in order; one runs at a time."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        # None outside of a forward, also while a backward recomputes a layer.
        self.running: Passage | None = None
        self.found: dict[Hashable, Findings] = {}  # by kind of forward
        self._numbers = {name: number for number, name in enumerate(names)}

    @property
    def past(self) -> bool:
        """True while the model's code after the stage's last module runs."""
        return self.running is not None and self.running.over

    @property
    def source(self) -> tuple[int, Any]:
        """The running stage, and the hidden states received from the previous stage."""
        return (0, None) if self.running is None else self.running.source

    def begin(
        self, kind: Hashable, stage: int, value: Any, modules: Iterable[str], siblings: str
    ) -> Passage:
        """Begin a forward of a stage with these modules; it runs until `running` is None again.

        `kind` holds the facts that may decide which code the forward runs. `siblings` is the list
        that holds the last module of the previous stage.
        """
        known = self.found.get(kind)
        given = stage, value, known or Findings(), siblings, self._numbers, modules
        self.running = passage = Passage(*given, examines=known is None)
        return passage

    def keep(self, kind: Hashable, passage: Passage) -> None:
        """Keep the findings of a forward that has succeeded."""
        findings = passage.findings
        if passage.copy is not None:
            findings.writes |= any(map(version_of, tensors_in(passage.copy)))
        if passage.examines:
            self.found[kind] = findings


class Passage:
    """A forward of a stage: it runs the model's whole forward, but computes only its own modules.

    The stage's computation begins when the last module of the previous stage returns the received
    hidden states, and ends when the stage's own last module returns. Modules before and after
    return stand-ins.

    The next stage computes the code after the last module, so its results are unused here. That
    code gets a copy of the hidden states passed on, and may write to it. Anything that it collects
    for the model's output, such as auxiliary losses of layers, would be lost.
    """

    def __init__(
        self,
        stage: int,
        value: Any,
        findings: Findings,
        siblings: str,
        numbers: Mapping[str, int],
        modules: Iterable[str],
        *,
        examines: bool,
    ) -> None:
        """Begin with a `value` from the previous stage, or the first stage's input.

        The first forward of a kind `examines`, and adds to the `findings`. The list `siblings`
        holds the last module of the previous stage. `numbers` are the indices of all stages'
        modules, by name, and `modules` are those of this stage.
        """
        passed = value if isinstance(value, Passed) else Passed(value, [], {})
        self.stage, self.hidden, self.examines = stage, passed.hidden, examines
        # The stage, and the hidden states it received; None for these on the first stage.
        self.source: tuple[int, Any] = stage, self.hidden if stage else None
        # By list, a layer's output; on meta for layers of earlier stages.
        self.samples = {**passed.forms.value, siblings: self.hidden} if stage else {}
        self.kinds: dict[str, Any] = {}  # by class, the output of a layer of this stage
        self.delivered = stage == 0  # whether the model's code has got the received hidden states
        self.over = False  # whether the rest of the forward belongs to later stages
        self.furthest = 0  # the latest stage with a module that was called, on any rank
        self.first: Any = None  # the first argument of the model's forward
        self.copy: Any = None  # of the received hidden states, if the model may write to them
        self.left: Any = None  # the output of this stage's most recent module
        self.inside = 0  # running calls of this stage's modules, nested ones included
        # Tensors that depend on the stage's modules; None unless the forward is examined.
        self.dependent = WeakTensorKeyDictionary() if examines else None
        self.findings, self._numbers = findings, numbers
        self._met = ""  # the first module called of the stage `furthest`
        self._passed: Any = None  # the hidden states to pass on
        self._gradients = torch.is_grad_enabled()
        self._changes: list[tuple[int, int]] = []  # of hidden states passed on without a copy
        self._calls: dict[str, int] = {}  # of modules that may take extra tensors
        # Extra tensors received, and those to send with their version.
        self._received = {
            place: passed.tensors[stack][index] for place, (stack, index) in passed.places.items()
        }
        own = {numbers[name] for name in modules} if self._received else ()
        self._leaving = {
            place: (tensor, version_of(tensor))
            for place, tensor in self._received.items()
            if place.module not in own
        }

    def come_back(self) -> None:
        """Record a call of a module of this stage after its last one."""
        self.over = False
        self.note(self.left)

    def deliver(self, where: str) -> Any:
        """Return the received hidden states as the output of the previous stage's last module."""
        if self.delivered:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward calls it more than once; a "
                "stage sends the output of its last module once. Move the repeated modules into "
                "one layer, or let the stage end after the loop, by Split(points=(...))"
            )
        self.delivered = True
        received = self.source[1]
        # The first forward of a kind finds out whether the model writes to them in place.
        if self.examines or self.findings.writes:
            self.copy = map_tensors(Tensor.clone, received)
            self.note(self.copy)
            return self.copy
        return map_tensors(_alias, received)

    def reach(self, stage: int, where: str) -> None:
        """Record that the forward calls a module with parameters; refuse to go back a stage."""
        if stage < self.furthest:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward comes back to it after "
                f"modules of stage {self.furthest}: {self._met}. A pipeline runs each stage once. "
                "If the model registers its modules in another order than it calls them, name the "
                "modules before the layers in Split(first=...) and those after them in "
                "Split(last=...). If layers run several times, place all of them on one stage, by "
                "Split(points=(...)), or use no pipeline (pp_size=1)"
            )
        self.furthest, self._met = stage, where

    def leave(self, output: Any) -> Any:
        """Keep the output of the stage's last module, and return a copy for the model's code."""
        self._passed, self._changes = output, []
        # Reentrant recomputation runs a layer under no_grad, then makes this very output require
        # grad, so it cannot be copied.
        if torch.is_grad_enabled() != self._gradients:
            self._changes = _changes(output)
            return output
        return map_tensors(Tensor.clone, output) if is_hidden(output) else output

    def passed_on(self, output: Any, parameters: Iterable[nn.Parameter], siblings: str) -> Hidden:
        """Return the value for the next stage: the output of this stage's last module.

        `output` is the model's, or None if its forward did not reach its end. `siblings` is the
        list that holds the last module.
        """
        self.over = True
        if self._passed is None:  # the model skips the last module, or all of them
            self._passed = self.source[1] if self.left is None else self.left
        hidden = self._passed
        if hidden is None:
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward has called no module of the first stage, "
                "so the stage has no output; take fewer stages, or name the modules that the "
                "forward calls in Split(...)"
            )
        if not is_hidden(hidden):
            kinds = {type(value).__name__ for value in strangers(hidden)} or {"no tensor"}
            raise InvalidArgumentError(
                f"{describe_rank()}: layers must pass on a tensor, or tuples, lists or dicts of "
                f"tensors, numbers, strings and None, got {', '.join(sorted(kinds))}; leave that "
                "out, or put it into a tensor"
            )
        if self._changes and self._changes != _changes(hidden):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward changes the hidden states after the last "
                "layer of this stage, in place or by a hook on their gradient. That layer is "
                "recomputed with use_reentrant=True, so the change would happen on two stages: "
                "make a new tensor, do it inside the layers, or recompute with use_reentrant=False"
            )
        self._refuse_collected(output, parameters)
        # The last module's output is sent, so later stages know the form of its list's outputs.
        forms = {
            name: sample
            for name, sample in self.samples.items()
            if name != siblings and not isinstance(sample, Tensor) and is_hidden(sample)
        }
        value: Hidden = self._with_extras(hidden, forms)
        return value

    def _refuse_collected(self, output: Any, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse an output that depends on this stage except through the value passed on."""
        passed = [*tensors_in(self._passed), *(tensor for tensor, _ in self._leaving.values())]
        stage_leaves: set[int] | None = None
        for tensor in tensors_in(output):
            leaves = {id(leaf) for leaf in _other_leaves([tensor], passed)}
            if leaves and stage_leaves is None:
                stage_leaves = {*map(id, parameters), *map(id, tensors_in(self.source[1]))}
            if stage_leaves is not None and not leaves.isdisjoint(stage_leaves):
                raise InvalidArgumentError(
                    f"{describe_rank()}: the model's forward returns a tensor of shape "
                    f"{tuple(tensor.shape)} that depends on this stage's layers, but not through "
                    "the output of the last one (an auxiliary loss, a skip connection, reversible "
                    "layers), so its gradient would be lost; let layers pass it on in one tuple "
                    "with the hidden states, or use no pipeline (pp_size=1)"
                )

    def note(self, value: Any) -> None:
        """Record tensors that depend on this stage's modules."""
        if self.dependent is not None:
            for tensor in tensors_in(value):
                self.dependent[tensor] = True

    def offer(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments of a later stage's module that its stage cannot compute itself."""
        if not (self.examines or self.findings.places):
            return
        module, call = self._next(name)
        for index, tensor in enumerate(tensors_in((args, kwargs))):
            place = Place(module, call, index)
            if isinstance(tensor, StandIn):
                continue
            if self.dependent is not None and tensor in self.dependent:
                self.findings.places.add(place)
            if place in self.findings.places:
                self._leaving[place] = tensor, version_of(tensor)

    def take(self, name: str, arguments: Any) -> Any:
        """Return the arguments of a module of this stage, with received tensors in place."""
        if not self._received:
            return arguments
        module, call = self._next(name)
        places = itertools.count()

        def taken(tensor: Tensor) -> Tensor:
            found = self._received.get(Place(module, call, next(places)))
            if found is None or not isinstance(tensor, StandIn):
                return tensor
            tensor.carried = found  # used again when the backward recomputes the layer
            return found

        return map_tensors(taken, arguments)

    def _with_extras(self, hidden: Any, samples: Mapping[str, Any]) -> Any:
        """Return the value to send: hidden states, alone or with extra tensors.

        `samples` are outputs of layers, by their list, whose form later stages cannot know.
        """
        if not self._leaving and not samples:
            return hidden
        if any(version_of(tensor) != version for tensor, version in self._leaving.values()):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward changes a tensor in place after it has "
                "passed it to a module of a later stage; make a new tensor"
            )
        stacks: dict[Hashable, list[Tensor]] = {}
        places = {}
        for place, (tensor, _) in self._leaving.items():
            form = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
            stack = stacks.setdefault(form, [])
            index = next((i for i, other in enumerate(stack) if other is tensor), len(stack))
            if index == len(stack):
                stack.append(tensor)
            places[place] = list(stacks).index(form), index
        tensors = [torch.stack(stack) for stack in stacks.values()]
        return Passed(hidden, tensors, places, Form(dict(samples)))

    def _next(self, name: str) -> tuple[int, int]:
        self._calls[name] = call = self._calls.get(name, 0) + 1
        return self._numbers[name], call


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _alias(tensor: Tensor) -> Tensor:
    """Return a view: a reentrant checkpoint sets its own `grad_fn` on the tensor it returns."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _changes(value: Any) -> list[tuple[int, int]]:
    """Return numbers that differ once a tensor is written to or gets a gradient hook."""
    return [(version_of(t), len(t._backward_hooks or ())) for t in tensors_in(value)]


def _other_leaves(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves (mostly parameters) that outputs depend on except through inputs."""
    seen = {_node_of(tensor) for tensor in inputs if tensor.requires_grad}
    todo = {_node_of(tensor) for tensor in outputs if tensor.requires_grad}
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            todo.update(following for following, _ in node.next_functions if following is not None)


def _node_of(tensor: Tensor) -> Any:
    node = tensor.grad_fn
    return get_gradient_edge(tensor).node if node is None else node  # slow, and only for leaves

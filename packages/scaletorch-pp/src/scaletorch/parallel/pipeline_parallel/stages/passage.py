"""A forward of a stage: how far it has come, what it has of other stages, what it passes on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ....dist.building import map_tensors, tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..runtime.forms import Hidden, is_hidden, strangers
from .extras import Extras, Place, version_of

MANY_FORMS = 4096  # kinds of forwards, and forms, that are remembered at most, on every rank


@dataclass(slots=True)
class Findings:
    """Facts about a kind of forwards: the first one finds them, and later ones rely on them.

    Attributes:
        places: Arguments of later stages' modules that travel beside hidden states.
        writes: The model's code writes to what the stage before has passed on.
    """

    places: set[Place] = field(default_factory=set)
    writes: bool = False


class Passages:
    """The forwards of a rank's stages, one at a time.

    Args:
        names: The modules of all stages, in order.

    Attributes:
        running: The forward that runs; None also where a layer is recomputed.
        found: The findings of each kind of forwards that has run.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.running: Passage | None = None
        self.found: dict[Hashable, Findings] = {}
        self._numbers = {name: number for number, name in enumerate(names)}

    @property
    def past(self) -> bool:
        """True while the model's own code runs after all modules of the stage."""
        return self.running is not None and self.running.over

    @property
    def source(self) -> tuple[int, Any]:
        """The stage that runs, and what the stage before has passed on."""
        return (0, None) if self.running is None else self.running.source

    @contextmanager
    def begin(
        self, kind: Hashable, stage: int, given: Any, own: Iterable[str], siblings: str
    ) -> Iterator[Passage]:
        """Run one forward in this context, and keep its findings if it succeeds.

        Args:
            kind: The facts that the way of the forward may depend on.
            stage: The stage.
            given: The input of the first stage, or what the stage before has passed on.
            own: The stage's modules.
            siblings: The list that the last module of the stage before is in.
        """
        if len(self.found) > MANY_FORMS:
            self.found.clear()
        findings, examines = self.found.get(kind, Findings()), kind not in self.found
        extras = Extras(self._numbers, own, findings.places, given, examines=examines)
        self.running = Passage(stage, extras, findings, siblings)
        try:
            yield self.running
            findings.writes |= any(map(version_of, tensors_in(self.running.copy)))
            self.found[kind] = findings
        finally:
            self.running = None


class Passage:
    """A forward of a stage: the model's own, of which the stage computes a part.

    That part begins where the last module of the stage before returns, with what the stage before
    has passed on, and ends where the stage's own last module returns. Modules before and after
    return stand-ins.

    The code after that last module is the next stage's to compute, and nothing of its results is
    used here: it is given a copy of what is passed on, to which it may write. What it collects for
    the model's output, such as auxiliary losses of layers, would be lost.

    Attributes:
        source: The stage, and what the stage before has passed on; None on the first stage.
        extras: The tensors that travel beside hidden states.
        examines: Whether this is the first forward of its kind.
        first: The first argument of the model's forward.
        furthest: The last stage of which it has met a module, in place or not.
        delivered: Whether what was passed on has been returned to the model's code.
        copy: What was returned so, if the model's code may write to it.
        samples: The output of a layer, by the list that the layer is in.
        kinds: The output of a layer of this stage, by its class.
        left: The output of the module of this stage that was called last.
        over: Whether the rest is another stage's.
    """

    def __init__(self, stage: int, extras: Extras, findings: Findings, siblings: str) -> None:
        """Begin; the last module of the stage before is in the list `siblings`."""
        self.source: tuple[int, Any] = stage, extras.hidden if stage else None
        self.extras, self._findings = extras, findings
        self.examines = extras.made is not None
        received = {**extras.forms, siblings: extras.hidden}
        self.samples: dict[str, Any] = received if stage else {}
        self.delivered, self.over = stage == 0, False
        self.furthest = 0
        self.first: Any = None
        self.copy: Any = None
        self.left: Any = None
        self.kinds: dict[str, Any] = {}
        self._met = ""  # the first module of the last stage that it has met
        self._visits = 0  # of the last module of the stage before
        self._visits_behind = 0.0  # of the stage's own
        self._passed: Any = None  # what it passes on
        self._gradients = torch.is_grad_enabled()
        self._changes: list[tuple[int, int]] = []  # of what it passes on and the model's code gets

    def come_back(self) -> None:
        """Note that a module of this stage is called; maybe once more, after the last of them."""
        if self.over:
            self.over = False
            self.extras.note(self.left)

    def comes(self) -> bool:
        """Return whether this call of the last module of the stage before returns what that gave.

        Layers may run in a loop; it is the last call then.
        """
        self._visits += 1
        return self._visits >= self.extras.visit

    def deliver(self, where: str) -> Any:
        """Return what the stage before has passed on, where its last module would return it.

        Raises:
            InvalidArgumentError: It has been returned already.
        """
        if self.delivered:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward calls it more than once; a "
                "pipeline passes on what the last module of a stage returns, once: put what is run "
                "several times into one layer"
            )
        self.delivered = True
        received = self.source[1]
        # It may be written to: whether it is, the first forward of a kind tells.
        if self.examines or self._findings.writes:
            self.copy = map_tensors(Tensor.clone, received)
            self.extras.note(self.copy)
            return self.copy
        return map_tensors(_alias, received)

    def reach(self, stage: int, where: str) -> None:
        """Note that the forward has come to a module with parameters.

        Args:
            stage: The module's stage.
            where: Its name and place.

        Raises:
            InvalidArgumentError: It was further already: it runs a module of one stage twice.
        """
        if stage < self.furthest:
            raise InvalidArgumentError(
                f"{describe_rank()}: {where}, and the model's forward comes back to it after "
                f"modules of stage {self.furthest}: {self._met}. A pipeline runs each stage once. "
                "If one of the two is only registered where it is not called, name what comes "
                "before the layers in Split(first=...) and what comes after them in Split(last="
                "...); if layers are run several times, have all of them on one stage, by "
                "Split(points=(...)), or use no pipeline (pp_size=1)"
            )
        if stage > self.furthest:
            self.furthest, self._met = stage, where

    def leave(self, output: Any, places: int) -> Any:
        """Take the output of the stage's last module; return what the model's code gets for it.

        Args:
            output: The output.
            places: How many places of the stage the module has, each of which is called in turn.
        """
        self._passed, self._changes = output, []
        self._visits_behind += 1 / places
        # Reentrant recomputation runs a layer without gradients, and then gives its output one.
        if torch.is_grad_enabled() != self._gradients:
            self._changes = _changes(output)
            return output
        return map_tensors(Tensor.clone, output) if is_hidden(output) else output

    def passed_on(
        self, output: Any, parameters: Iterable[nn.Parameter], samples: Mapping[str, Any]
    ) -> Hidden:
        """Return what a stage but the last passes on: the output of its last module.

        Args:
            output: What the model's forward has returned; None if it did not come to its end.
            parameters: The stage's.
            samples: What layers of other lists than the last one's have returned, in containers.

        Raises:
            InvalidArgumentError: It was changed, cannot be passed on, or is not all of it.
        """
        self.over = True
        if self._passed is None:  # its last module is left out, or all of them are
            left = self.source[1] if self.left is None else self.left
            if left is None:
                raise InvalidArgumentError(
                    f"{describe_rank()}: the model's forward has called no module of the first "
                    "stage, so there is nothing to pass on; take fewer stages, or name the "
                    "modules that it calls in Split(...)"
                )
            self._passed = left
        left = self._passed
        if self._changes:
            self._refuse_collected(output, parameters, _reversible_message)
        if not is_hidden(left):
            raise InvalidArgumentError(_stranger_message(left))
        if self._changes and self._changes != _changes(left):
            raise InvalidArgumentError(
                f"{describe_rank()}: the model's forward changes, in place or by a hook on their "
                "gradient, the hidden states after the last layer of this stage, which has run "
                "without gradients (use_reentrant=True), so it would happen on two stages: let it "
                "make new ones, put that into the layers, or recompute with use_reentrant=False"
            )
        self._refuse_collected(output, parameters, _collected_message)
        hidden: Hidden = self.extras.leave(left, max(round(self._visits_behind), 1), samples)
        return hidden

    def _refuse_collected(
        self, output: Any, parameters: Iterable[nn.Parameter], message: Callable[[Tensor], str]
    ) -> None:
        """Refuse an output that depends on this stage by another way than what it passes on.

        Raises:
            InvalidArgumentError: It does.
        """
        passed = [*tensors_in(self._passed), *self.extras.tensors()]
        own: set[int] | None = None
        for tensor in tensors_in(output):
            leaves = {id(leaf) for leaf in _trained_beside([tensor], passed)}
            if leaves and own is None:
                own = {*map(id, parameters), *map(id, tensors_in(self.source[1]))}
            if own is not None and not leaves.isdisjoint(own):
                raise InvalidArgumentError(message(tensor))


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, also if its calls are surrounded."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor itself as another one: reentrant recomputation takes its place."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


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


def _changes(value: Any) -> list[tuple[int, int]]:
    """Return numbers that differ once tensors are written to, or their gradients hooked."""
    return [(version_of(each), len(each._backward_hooks or ())) for each in tensors_in(value)]


def _trained_beside(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves, mostly parameters, that outputs depend on not through inputs."""
    seen = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    todo = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            todo += [following for following, _ in node.next_functions if following is not None]

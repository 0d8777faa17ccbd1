"""The plain model runs once more, whole: its units on what ranks had, the weights of one at a time.

The root, all that is in no unit, runs as it is. Each call of a unit takes the ranks' hidden states,
and hands on theirs, so that errors do not travel; in backward likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...dist.building import map_tensors, tensors_in
from ..plain import Plain
from ..summation import root_mean_square
from .judging import WIDER, Judge
from .quiet import State, buffers_in, without_autocast
from .ranks import Ranks
from .recording import hidden_of, is_same

Gradients = dict[str, Tensor]


class _Handover(torch.autograd.Function):
    """Connects the output of a replayed unit to the autograd graph of the root."""

    @staticmethod
    def forward(ctx: Any, call: _Call, _anchor: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what the call hands on."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach().clone() for tensor in call.handed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradients of the call's inputs."""
        return None, None, *ctx.call.backward(gradients)


@dataclass(slots=True)
class _Made:
    """One run of a unit.

    Attributes:
        inputs: Leaves: the hidden states first, then other tensors that require a gradient.
        weights: By first name.
        outputs: The hidden states first, then other tensors that require a gradient.
        result: All that the unit returned.
    """

    inputs: list[Tensor]
    weights: Mapping[str, nn.Parameter]
    outputs: list[Tensor]
    result: Any


@dataclass(slots=True)
class _Call:
    """One call of a unit by the plain root.

    Attributes:
        replay: The run that it is part of.
        name: The unit.
        run: The unit's own call.
        args: Its arguments; the hidden states in them are the ranks'.
        kwargs: Those by name.
        hidden: The hidden states among them, None if there are none.
        turn: Which call of the unit it is, from 0 on.
        before: The unit's buffers and attributes before it.
        handed: What is handed on to the root and requires a gradient, the hidden states first.
        came: Gradients that were given for `handed`.
    """

    replay: Replay
    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor | None
    turn: int
    before: State
    handed: list[Tensor] = field(default_factory=list)
    came: list[Tensor | None] = field(default_factory=list)
    _wide: tuple[_Made, list[Tensor | None]] | None = None

    def again(self, wide: torch.dtype | None = None) -> _Made:
        """Run the unit once more, from what it was before the call."""
        now = State(self.replay.plain.units[self.name].modules())
        self.before.put_back()
        try:
            return self.make(wide)
        finally:
            now.put_back()

    def make(self, wide: torch.dtype | None = None) -> _Made:
        """Run the unit with a graph of its own, in a wider dtype if one is given."""
        leaves: dict[int, Tensor] = {}

        def leaf(x: Tensor) -> Tensor:
            if id(x) not in leaves:
                made = x.detach()
                if wide is not None and x.is_floating_point():
                    made = made.to(wide)
                trains = x.requires_grad and torch.is_grad_enabled()
                leaves[id(x)] = made.requires_grad_() if trains else made
            return leaves[id(x)]

        args, kwargs = map_tensors(leaf, (self.args, self.kwargs))
        weights = self.replay.weights(self.name, wide)
        unit = self.replay.plain.units[self.name]
        with (
            self.replay.plain.lent(self.name, weights),
            buffers_in(unit, wide),
            self.replay.judge.casts(),
        ):
            result = self.run(*args, **kwargs)
        y = hidden_of(result)
        others = [x for x in tensors_in(result) if x.requires_grad and x is not y]
        trained = [x for x in self._inputs() if x.requires_grad]
        return _Made(
            [leaves[id(x)] for x in trained],
            weights,
            [*([] if y is None else [y]), *others],
            result,
        )

    def _inputs(self) -> list[Tensor]:
        """Return the arguments' tensors that may require gradients, the hidden states first."""
        found = {id(x): x for x in tensors_in((self.args, self.kwargs))}
        first = [] if self.hidden is None else [self.hidden]
        return [*first, *(x for x in found.values() if x is not self.hidden)]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the unit backward, compare, and return the ranks' gradient of its hidden states."""
        replay, self.came = self.replay, [*gradients]
        theirs = self.came[0]
        self.came[0] = self._met(
            "made_gradient", f"gradient that comes back to {self.name}", theirs
        )
        with torch.enable_grad():
            made = self.again()
        found = self._gradients(made)
        inputs, weights = found[: len(made.inputs)], found[len(made.inputs) :]
        trained = [name for name, weight in made.weights.items() if weight.requires_grad]
        replay.add(self, dict(zip(trained, weights, strict=True)))
        if self.hidden is not None and self.hidden.requires_grad:
            what = f"gradient of the input of {self.name}"
            inputs[0] = self._met("given_gradient", what, inputs[0], exact=partial(self.exact, 0))
        return inputs

    def _met(
        self,
        kind: str,
        what: str,
        theirs: Tensor | None,
        *,
        exact: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Compare what ranks had of this call with one process's; return theirs if it is known."""
        of = self.handed[0] if kind.startswith("made") or self.hidden is None else self.hidden
        ours, known = self.replay.ranks.join(self.name, self.turn, kind, of.shape)
        if not known:
            return theirs
        if self.replay.ranks.runs(self.name) and self.name not in self.replay.random:
            self.replay.judge.compare(what, ours, theirs, exact=exact)
        return theirs if ours is None else ours.to(of.dtype)

    def _gradients(self, made: _Made) -> list[Tensor | None]:
        trained = [weight for weight in made.weights.values() if weight.requires_grad]
        pairs = [
            (y, g.to(y.dtype))
            for y, g in zip(made.outputs, self.came, strict=False)
            if g is not None and y.requires_grad
        ]
        wanted = [*made.inputs, *trained]
        if not pairs or not wanted:
            return [None] * len(wanted)
        # Not autograd.grad, which a reentrant checkpoint refuses; all leaves are new.
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return [each.grad for each in wanted]

    def exact(self, index: int) -> Tensor:
        """Return a gradient in a wider dtype: of an input, or behind these of a weight."""
        _, gradients = self.widely()
        found = gradients[index]
        return torch.zeros(()) if found is None else found

    def exact_output(self) -> Tensor:
        """Return the output in a wider dtype."""
        with torch.no_grad(), without_autocast(self.args):
            return self.again(self._wider()).outputs[0]

    def output_again(self) -> Tensor:
        """Return the output of the same call, made again."""
        with torch.no_grad():
            return self.again().outputs[0]

    def exact_weight(self, name: str) -> Tensor | None:
        """Return the gradient of a weight in a wider dtype."""
        made, gradients = self.widely()
        trained = [each for each, weight in made.weights.items() if weight.requires_grad]
        return gradients[len(made.inputs) + trained.index(name)]

    def widely(self) -> tuple[_Made, list[Tensor | None]]:
        """Return a run in a wider dtype and its gradients, kept."""
        if self._wide is None:
            with torch.enable_grad(), without_autocast(self.args):
                made = self.again(self._wider())
                self._wide = made, self._gradients(made)
        return self._wide

    def _wider(self) -> torch.dtype:
        weights = self.replay.weights(self.name).values()
        dtypes = [w.dtype for w in weights if w.dtype in WIDER]
        return WIDER.get(dtypes[0] if dtypes else torch.float32, torch.float64)


@dataclass(slots=True)
class Replay:
    """One run of the plain model.

    Attributes:
        plain: The model.
        ranks: What the layout's ranks had.
        judge: Compares.
        unasked: What could not be compared, and why.
        random: Units that give another answer each time.
    """

    plain: Plain
    ranks: Ranks
    judge: Judge
    unasked: list[str] = field(default_factory=list)
    random: set[str] = field(default_factory=set)
    _turns: dict[str, int] = field(default_factory=dict)
    _earlier: list[tuple[str, Tensor, int]] = field(default_factory=list)  # without gradients
    _done: dict[str, list[_Call]] = field(default_factory=dict)
    _found: Gradients = field(default_factory=dict)
    _held: tuple[str, dict[str, Tensor]] | None = None
    _anchor: Tensor = field(default_factory=lambda: torch.zeros(1, requires_grad=True))

    def run(
        self, batch: Mapping[str, Any], loss_of: Callable[[Any], Tensor | None], loss: Tensor
    ) -> None:
        """Run the model forward and backward, and compare everything on the way.

        Args:
            batch: What one process's model is called with.
            loss_of: Returns the loss of an output; None if it cannot be asked.
            loss: The layout's.
        """
        entries = {n: x for n, x in batch.items() if n not in ("input_ids", "labels")}
        weights = self.weights("")
        with self.plain.lent("", weights), self.plain.replaced(self._answer):
            with self.judge.casts():
                output = self.plain.model(batch["input_ids"], **entries)
            found = loss_of(output)
            if found is None:
                self.unasked.append("the loss, which communicates itself")
                return
            self.judge.compare("the loss", loss, found.detach())
            trained = [weight for weight in weights.values() if weight.requires_grad]
            penalised = self._add_penalties(found)
            found.backward(inputs=[self._anchor, *trained] if penalised else None)
        for name, weight in weights.items():
            if weight.grad is not None:
                self._add(name, weight.grad)
        for owner in ("", *self.plain.units):
            self._compare_gradients(owner, [*self._done.get(owner, [])], last=True)

    def _add_penalties(self, loss: Tensor) -> bool:
        """Add gradients of weights that a loss has read itself, of the layout's model, if any."""
        held = self.ranks.trained_here()
        found = torch.autograd.grad(loss, [*held.values()], retain_graph=True, allow_unused=True)
        for name, gradient in zip(held, found, strict=True):
            if gradient is not None:
                self._add(name, gradient)
        return any(gradient is not None for gradient in found)

    def weights(self, owner: str, wide: torch.dtype | None = None) -> dict[str, nn.Parameter]:
        """Return the whole weights of a unit or of the root, from all ranks.

        Those of the owner that was asked for last are kept, so that a rank can ask for them again
        without the others.
        """
        if self._held is None or self._held[0] != owner:
            self._held = None  # before there are others
            self._held = owner, self.ranks.weights(self.plain.owners[owner])
        found = self._held[1]
        return {
            name: nn.Parameter(
                weight if wide is None or not weight.is_floating_point() else weight.to(wide),
                requires_grad=self.ranks.trains(name) and weight.is_floating_point(),
            )
            for name, weight in found.items()
        }

    def _answer(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a unit: the ranks' hidden states in place of its own."""
        x = hidden_of((args, kwargs))
        turn = self._turn_of(name, x)
        before = State(self.plain.units[name].modules())
        call = _Call(self, name, run, args, kwargs, x, turn, before)
        if x is not None:
            ours, _ = self.ranks.join(name, turn, "given", x.shape)
            if ours is not None:
                self.judge.compare(f"what {name} is given", ours, x.detach())
                ours = ours.to(x.dtype).requires_grad_(x.requires_grad)
                call.args, call.kwargs = map_tensors(
                    lambda tensor: ours if tensor is x else tensor, (args, kwargs)
                )
                call.hidden = ours
        made = call.make()
        y = hidden_of(made.result)
        if y is None:
            self.unasked.append(f"{name}, which returns no floating tensor")
            return made.result
        ours, known = self.ranks.join(name, turn, "made", y.shape)
        if known and self.ranks.runs(name):
            same = self.judge.compare(
                f"output of {name}", ours, y.detach(),
                exact=call.exact_output, again=call.output_again,
            )  # fmt: skip
            if not same:
                self.random.add(name)
                self.unasked.append(f"{name}, which gives another answer each time")
        call.handed = [y.detach() if ours is None else ours.to(y.dtype), *made.outputs[1:]]
        if not any(each.requires_grad for each in made.outputs):
            return map_tensors(lambda t: call.handed[0] if t is y else t, made.result)
        given = [x, *call._inputs()[1:]] if x is not None else call._inputs()
        trained = [each for each in given if each is not None and each.requires_grad]
        handed = _Handover.apply(call, self._anchor, *trained)  # type: ignore[no-untyped-call]
        swapped = dict(zip(map(id, made.outputs), handed, strict=True))
        self._done.setdefault(name, [])
        return map_tensors(lambda t: swapped.get(id(t), t.detach()), made.result)

    def _turn_of(self, name: str, x: Tensor | None) -> int:
        """Return which call of a unit this is; that of its forward if it runs again in backward."""
        if torch._C._current_graph_task_id() != -1:
            again = (turn for of, given, turn in self._earlier if of == name and is_same(given, x))
            found = next(again, None)
            if found is not None:
                return found
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        if x is not None and not torch.is_grad_enabled():
            self._earlier.append((name, x.detach().clone(), turn))
        return turn

    def add(self, call: _Call, gradients: Mapping[str, Tensor | None]) -> None:
        """Add a call's gradients of weights; compare them when they are all there."""
        for name, gradient in gradients.items():
            if gradient is not None:
                self._add(name, gradient)
        calls = self._done.setdefault(call.name, [])
        calls.append(call)
        if len(calls) == self._turns[call.name] + 1:
            self._compare_gradients(call.name, calls)

    def _add(self, name: str, gradient: Tensor) -> None:
        self._found[name] = self._found[name] + gradient if name in self._found else gradient

    def _compare_gradients(self, owner: str, calls: list[_Call], *, last: bool = False) -> None:
        """Compare the gradients of a unit or the root; shared weights are compared last."""
        holders = self.plain.owners
        shared = {n for n in holders[owner] if sum(n in names for names in holders.values()) > 1}
        names = [
            name
            for name in holders[owner]
            if self.ranks.trains(name) and (last or name not in shared)
            if name not in self.ranks.compared
        ]
        if not names:
            return
        ours = self.ranks.gradients(names)
        typical = root_mean_square(g for n in names if (g := self._found.get(n)) is not None)
        for name in names:
            exact = None
            if calls and not last and name not in shared:
                exact = partial(_sum_of, name, calls)
            self.ranks.compared.add(name)
            theirs = self._found.pop(name, None)
            if not owner or (owner not in self.random and self.ranks.runs(owner)):
                self.judge.compare(
                    f"gradient of {name}", ours.get(name), theirs, typical=typical, exact=exact
                )
        for call in calls:
            call._wide = None


def _sum_of(name: str, calls: Sequence[_Call]) -> Tensor:
    found = [g for call in calls if (g := call.exact_weight(name)) is not None]
    return torch.stack(found).sum(0)

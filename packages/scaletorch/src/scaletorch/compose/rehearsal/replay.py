"""Run the whole plain model on the hidden states that ranks had, one unit's weights at a time.

Units are the layers; the root is everything outside of them, and runs normally. Each call of a unit
takes the ranks' hidden states as its input and passes the ranks' output on to the root, so that an
error in one unit does not reach the next; backward does the same with gradients.

So no unit needs another's result, and units that return only hidden states are given out: as soon
as there is one for every rank, each rank runs a different one, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from ...dist.building import map_tensors, tensors_in
from ...parallel.pg_manager.building import ModuleState
from ..plain import Plain
from ..summation import root_mean_square
from .calls import Call, Handover, sum_of
from .judge import Judge, Watch
from .ranks import Ranks
from .training import hidden_states_of, is_same


@dataclass(slots=True)
class Replay:
    """One run of the plain model; if `gives_out`, ranks run different units."""

    plain: Plain
    ranks: Ranks
    judge: Judge
    gives_out: bool = False
    has_loss: bool = True  # the plain model's loss is known
    unasked: list[str] = field(default_factory=list)  # failed comparisons, with reasons
    left_out: set[str] = field(default_factory=set)  # units whose gradients are not compared
    _held: tuple[str, dict[str, Tensor]] | None = None  # the last owner and its whole weights
    _given_out: int = 0
    _own: Callable[[], None] | None = None
    _turns: dict[str, int] = field(default_factory=dict)
    _earlier: list[tuple[str, Tensor, int]] = field(default_factory=list)  # calls in checkpoints
    _done: dict[str, list[Call]] = field(default_factory=dict)
    _found: dict[str, Tensor] = field(default_factory=dict)  # gradients
    _beside: set[str] = field(default_factory=set)  # weights with gradients from outside calls
    _leaves: list[tuple[Call, int, str, ref[Tensor]]] = field(default_factory=list)
    _anchor: Tensor = field(default_factory=lambda: torch.zeros(1, requires_grad=True))

    def run(self, batch: Mapping[str, Any], loss_of: Callable[[Any], Tensor], loss: Tensor) -> None:
        """Run the model both ways, and compare; a loss that communicates is not known."""
        entries = {n: x for n, x in batch.items() if n not in ("input_ids", "labels")}
        weights = self.weights("")
        with self.plain.lent("", weights), self.plain.replaced(self._answer):
            with Watch(self.judge):
                output = self.plain.model(batch["input_ids"], **entries)
            self._run_own()
            with Watch() as watch:
                found = loss_of(output)
            if not watch.communicates:
                self.judge.compare("the loss", loss, found.detach())
            else:  # the ranks' gradients suffice to compare units, but not the root
                self.has_loss = False
                self.unasked.append(
                    "the loss, which communicates itself, and gradients outside of layers"
                )
                outputs = [x.real.sum() * 0 for x in tensors_in(output) if x.requires_grad]
                if not outputs:
                    return
                found = torch.stack(outputs).sum()
            trained = [weight for weight in weights.values() if weight.requires_grad]
            penalised = self._add_penalties(found)
            self._add_beside(found)
            found.backward(inputs=[self._anchor, *trained] if penalised else None)
        for name, weight in weights.items():
            if weight.grad is not None:
                self._add(name, weight.grad)
        for owner in ("", *self.plain.units):
            self._compare_gradients(owner, [*self._done.get(owner, [])], last=True)

    def weights(self, owner: str, wide: torch.dtype | None = None) -> dict[str, nn.Parameter]:
        """Return the whole weights of a unit or the root, cached for one owner."""
        if self._held is None or self._held[0] != owner:
            self._held = None  # free these before others are gathered
            self._held = owner, self.ranks.weights(self.plain.owners[owner])
        parameters = {}
        for name, weight in self._held[1].items():
            floats = weight.is_floating_point()
            parameters[name] = nn.Parameter(
                weight.to(wide) if wide is not None and floats else weight,
                requires_grad=self.ranks.trains(name) and (floats or weight.is_complex()),
            )
        for name, hooks in self.plain.hooks.items():
            for hook in hooks if name in parameters and parameters[name].requires_grad else ():
                parameters[name].register_hook(hook)
        return parameters

    def _add_penalties(self, loss: Tensor) -> bool:
        """Add gradients of the layout's weights that the loss reads; return whether any exist."""
        held = self.ranks.trained_here()
        if not held:  # a frozen stage
            return False
        found = torch.autograd.grad(loss, [*held.values()], retain_graph=True, allow_unused=True)
        for name, gradient in zip(held, found, strict=True):
            if gradient is not None:
                self._add(name, gradient)
        return any(gradient is not None for gradient in found)

    def _add_beside(self, loss: Tensor) -> None:
        """Add gradients that reach units by other ways than the results of their calls."""
        held = [(c, i, n, leaf) for c, i, n, each in self._leaves if (leaf := each()) is not None]
        if not held:
            return
        leaves = [leaf for *_, leaf in held]
        found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        for (call, index, name, _), gradient in zip(held, found, strict=True):
            if gradient is None:
                continue
            self.need_loss(call.name)
            if name:
                self._add(name, gradient)
                self._beside.add(name)
            else:
                call.beside += [None] * (index + 1 - len(call.beside))
                call.beside[index] = gradient

    def _answer(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a unit, compare it, and return its result with the ranks' hidden states."""
        x = hidden_states_of((args, kwargs))
        turn = self._turn_of(name, x)
        before = ModuleState(self.plain.units[name].modules())
        call = Call(self, name, run, args, kwargs, x, turn, before)
        if x is not None:
            ours, _ = self.ranks.join(name, turn, "input", x.shape)
            if ours is not None:
                self.judge.compare(f"input of {name}", ours, x.detach(), is_hidden=True)
                ours = ours.to(x.dtype).requires_grad_(x.requires_grad)
                call.args, call.kwargs = map_tensors(
                    lambda tensor: ours if tensor is x else tensor, (args, kwargs)
                )
                call.hidden = ours
                alone = self.gives_out and self.ranks.returns_alone(name)
                if alone and torch.is_grad_enabled() and len(call.trained_inputs()) < 2:
                    handed = self._give_out(call, x)
                    if handed is not None:
                        return handed
        unit_run = call.make()
        y = hidden_states_of(unit_run.result)
        if y is None:
            self.unasked.append(f"{name}, which returns no floating tensor")
            return unit_run.result
        ours, known = self.ranks.join(name, turn, "output", y.shape)
        runs_again = torch._C._current_graph_task_id() != -1  # a layer may count its runs
        if known and self.ranks.runs(name) and not runs_again:
            same = self.judge.compare(
                f"output of {name}", ours, y.detach(),
                is_hidden=True, other=call.other_output, again=call.other_output,
            )  # fmt: skip
            if not same:
                self.left_out.add(name)
                self.unasked.append(f"{name}, which gives another answer each time")
        call.handed = [y.detach() if ours is None else ours.to(y.dtype), *unit_run.outputs[1:]]
        if not any(each.requires_grad for each in unit_run.outputs):
            return map_tensors(lambda t: call.handed[0] if t is y else t, unit_run.result)
        given = [x if each is call.hidden else each for each in call.trained_inputs()]
        handed = Handover.apply(call, self._anchor, *given)  # type: ignore[no-untyped-call]
        swapped = dict(zip(map(id, unit_run.outputs), handed, strict=True))
        leaves = [(index, "", leaf) for index, leaf in enumerate(unit_run.inputs)]
        leaves += [(0, n, weight) for n, weight in unit_run.weights.items() if weight.requires_grad]
        self._leaves += [(call, index, n, ref(leaf)) for index, n, leaf in leaves]
        self._done.setdefault(name, [])
        return map_tensors(lambda t: swapped.get(id(t), t.detach()), unit_run.result)

    def _give_out(self, call: Call, x: Tensor) -> Tensor | None:
        """Let the next rank run a call; return the ranks' output, None if it cannot be joined."""
        ranks, name = self.ranks, call.name
        kinds = ("output", "output_gradient", "input_gradient")
        output, came, went = (ranks.join(name, 0, kind, x.shape) for kind in kinds)
        if output.tensor is None or not (came.known and went.known):
            return None
        names = self.plain.owners[name]
        trained = [each for each in names if ranks.trains(each)]
        weights, theirs = ranks.weights(names), ranks.gradients(trained)
        ranks.compared.update(trained)
        call.given_out, call.handed = True, [output.tensor.detach()]
        if self._given_out == ranks.manager.global_rank:
            own = replace(call, came=[came.tensor])
            self._own = partial(self._run_given, own, went.tensor, weights, theirs)
        call.args, call.kwargs, call.hidden = (), {}, None
        if torch._C._current_graph_task_id() == -1:  # not a second run in backward
            self._given_out += 1
        if self._given_out == ranks.manager.world_size:
            self._run_own()
        if not (trained or x.requires_grad):
            return call.handed[0]
        inputs = [x] if x.requires_grad else []
        (handed,) = Handover.apply(call, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        return cast(Tensor, handed)

    def _run_own(self) -> None:
        """Run the unit that was given to this rank, while the other ranks run theirs."""
        self._given_out, own, self._own = 0, self._own, None
        if own is None:
            return
        try:
            own()
        except Exception as error:  # other ranks go on; afterwards every rank runs all units
            self.judge.missing(f"{type(error).__name__}: {error}")

    def _run_given(
        self,
        call: Call,
        went: Tensor | None,
        weights: dict[str, Tensor],
        theirs: Mapping[str, Tensor],
    ) -> None:
        """Run a unit, and compare its output and gradients with the ranks'."""
        name, compare = call.name, self.judge.compare
        self._held = name, weights
        with torch.enable_grad():
            unit_run = call.again()
        what, ours, output = f"output of {name}", call.handed[0], unit_run.outputs[0].detach()
        again = call.other_output
        if not compare(what, ours, output, is_hidden=True, other=again, again=again):
            self.judge.missing(f"{name} gives another answer each time")
        inputs, gradients = call.gradients(unit_run)
        if inputs:
            what, other = f"gradient of the input of {name}", call.other_input
            compare(what, went, inputs[0], is_hidden=True, other=other)
        typical = root_mean_square(g for g in gradients.values() if g is not None)
        for each, gradient in gradients.items():
            other = partial(sum_of, each, [call])
            what = f"gradient of {each}"
            compare(what, theirs.get(each), gradient, typical=typical, other=other)

    def need_loss(self, name: str) -> None:
        """Compare no gradients of a unit if they follow from a loss that is not known."""
        if not self.has_loss and name not in self.left_out:
            self.left_out.add(name)
            self.unasked.append(f"gradients of {name}, which follow from the loss")

    def _turn_of(self, name: str, x: Tensor | None) -> int:
        """Return the index of this call of a unit; a second run in backward keeps its index."""
        if torch._C._current_graph_task_id() != -1:
            again = (turn for of, given, turn in self._earlier if of == name and is_same(given, x))
            found = next(again, None)
            if found is not None:
                return found
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if x is not None and not (torch.is_grad_enabled() and checkpoint is None):
            self._earlier.append((name, x.detach().clone(), turn))
        return turn

    def add_call(self, call: Call, gradients: Mapping[str, Tensor | None]) -> None:
        """Add a call's gradients of weights; compare them after the unit's last call."""
        for name, gradient in gradients.items():
            if gradient is not None:
                self._add(name, gradient)
        calls = self._done.setdefault(call.name, [])
        calls.append(call)
        if len(calls) == self._turns[call.name] + 1:
            self._compare_gradients(call.name, calls)

    def _add(self, name: str, gradient: Tensor) -> None:
        self._found[name] = self._found[name] + gradient if name in self._found else gradient

    def _compare_gradients(self, owner: str, calls: list[Call], *, last: bool = False) -> None:
        """Compare the gradients of a unit or the root; shared weights are compared last."""
        holders = self.plain.owners
        shared = {n for n in holders[owner] if sum(n in names for names in holders.values()) > 1}
        names = [
            name
            for name in holders[owner]
            if self.ranks.trains(name) and (last or name not in shared)
            if name not in self.ranks.compared and (self.has_loss or name not in holders[""])
        ]
        if not names:
            return
        ours = self.ranks.gradients(names)
        typical = root_mean_square(g for n in names if (g := self._found.get(n)) is not None)
        for name in names:
            other = None
            if calls and not last and name not in shared | self._beside:
                other = partial(sum_of, name, calls)
            self.ranks.compared.add(name)
            theirs = self._found.pop(name, None)
            if not owner or (owner not in self.left_out and self.ranks.runs(owner)):
                self.judge.compare(
                    f"gradient of {name}", ours.get(name), theirs, typical=typical, other=other
                )
        for call in calls:
            call.others.clear()

"""One call of a unit in the plain model, run on the ranks' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...dist.building import map_tensors, tensors_in
from ...parallel.pg_manager.building import ModuleState
from .judge import WIDER, Watch
from .training import buffers_in, hidden_states_of, without_autocast


class Handover(torch.autograd.Function):
    """The link from the output of a replayed unit to the autograd graph of the root."""

    @staticmethod
    def forward(ctx: Any, call: Call, _anchor: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the call passes on to the root."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach().clone() for tensor in call.handed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradients of the call's inputs."""
        if torch.is_grad_enabled():
            raise RuntimeError(f"the model takes gradients through {ctx.call.name} in its forward")
        return None, None, *ctx.call.backward(gradients)


@dataclass(slots=True)
class UnitRun:
    """One run of a unit: leaves and outputs have the hidden states first."""

    inputs: list[Tensor]
    weights: Mapping[str, nn.Parameter]  # by first name
    outputs: list[Tensor]
    result: Any


# Gradients of inputs, and gradients of weights by name.
Gradients = tuple[list[Tensor | None], dict[str, Tensor | None]]


@dataclass(slots=True)
class Call:
    """One call of a unit by the plain root, on the ranks' hidden states."""

    replay: Any  # the `Replay` that runs the root
    name: str
    run: Callable[..., Any]  # the unit's own call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor | None  # the hidden states among the arguments
    turn: int  # index of this call of the unit
    before: ModuleState  # buffers and attributes before the call
    handed: list[Tensor] = field(default_factory=list)  # outputs, the hidden states first
    came: list[Tensor | None] = field(default_factory=list)  # the gradients of `handed`
    given_out: bool = False  # a single rank runs this call and compares
    # Gradients of `trained_inputs` that come through an attribute or a tensor that a hook kept.
    beside: list[Tensor | None] = field(default_factory=list)
    others: dict[int, Gradients] = field(default_factory=dict)  # of runs in other ways

    def again(self, way: int | None = None) -> UnitRun:
        """Run the unit once more, from its state before the call; for `way` see `make`."""
        now = ModuleState(self.replay.plain.units[self.name].modules())
        self.before.put_back()
        try:
            return self.make(way)
        finally:
            now.put_back()

    def make(self, way: int | None = None) -> UnitRun:
        """Run the unit in a graph of its own; `way` 0 is a wider dtype, others seed roundings."""
        leaves: dict[int, Tensor] = {}
        wide = self._wider() if way == 0 else None

        def leaf(x: Tensor) -> Tensor:
            if id(x) not in leaves:
                copy = x.detach()
                if wide is not None and x.is_floating_point():
                    copy = copy.to(wide)
                if way and x is self.hidden:
                    copy = _perturb(copy, way)
                trains = x.requires_grad and torch.is_grad_enabled()
                leaves[id(x)] = copy.requires_grad_() if trains else copy
            return leaves[id(x)]

        args, kwargs = map_tensors(leaf, (self.args, self.kwargs))
        weights = self.replay.weights(self.name, wide)
        unit = self.replay.plain.units[self.name]
        with (
            self.replay.plain.lent(self.name, weights),
            buffers_in(unit, wide),
            saved_tensors_hooks(_itself, _itself),  # override hooks of a checkpoint around the call
            Watch(self.replay.judge),
        ):
            result = self.run(*args, **kwargs)
        y = hidden_states_of(result)
        others = [x for x in tensors_in(result) if x.requires_grad and x is not y]
        return UnitRun(
            [leaves[id(x)] for x in self.trained_inputs()],
            weights,
            [*([] if y is None else [y]), *others],
            result,
        )

    def trained_inputs(self) -> list[Tensor]:
        """Return the arguments' tensors that require gradients, the hidden states first."""
        first = [] if self.hidden is None else [self.hidden]
        found = {id(x): x for x in [*first, *tensors_in((self.args, self.kwargs))]}
        return [x for x in found.values() if x.requires_grad]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the unit backward, compare, and return the ranks' gradient of its hidden states."""
        self.came = [*gradients]
        if len(self.handed) > 1:  # others' gradients are those of the loss
            self.replay.need_loss(self.name)
        self.came[0] = self._compare_gradient("output", self.came[0])
        if self.given_out:
            hidden = self.handed[0]  # the unit's input has the same shape
            ranks = self.replay.ranks
            return [ranks.join(self.name, self.turn, "input_gradient", hidden.shape).tensor]
        with torch.enable_grad():
            unit_run = self.again()
        found, weights = self.gradients(unit_run)
        pairs = zip_longest(found, self.beside)
        inputs = [b if a is None else a if b is None else a + b for a, b in pairs]
        self.replay.add_call(self, weights)
        if self.hidden is not None and self.hidden.requires_grad:
            other = None if any(g is not None for g in self.beside) else self.other_input
            inputs[0] = self._compare_gradient("input", inputs[0], other=other)
        return inputs

    def _compare_gradient(
        self, side: str, theirs: Tensor | None, other: Callable[[int], Tensor] | None = None
    ) -> Tensor | None:
        """Compare the ranks' gradient with `theirs`; return the ranks', or `theirs` if unknown."""
        like = self.handed[0] if side == "output" or self.hidden is None else self.hidden
        ours, known = self.replay.ranks.join(self.name, self.turn, f"{side}_gradient", like.shape)
        if not known:
            if side == "output":
                self.replay.need_loss(self.name)
            return theirs
        # Without a loss the root may hand on too little.
        looks = side == "input" or self.replay.has_loss
        if looks and self.replay.ranks.runs(self.name) and self.name not in self.replay.left_out:
            what = f"gradient of the {side} of {self.name}"
            self.replay.judge.compare(what, ours, theirs, is_hidden=True, other=other)
        return theirs if ours is None else ours.to(like.dtype)

    def gradients(self, unit_run: UnitRun) -> Gradients:
        """Run a call backward; return gradients of its inputs and of its weights."""
        trained = {name: w for name, w in unit_run.weights.items() if w.requires_grad}
        pairs = [
            (y, g.to(y.dtype))
            for y, g in zip(unit_run.outputs, self.came, strict=False)
            if g is not None and y.requires_grad
        ]
        if pairs and (unit_run.inputs or trained):
            # Not autograd.grad, which a reentrant checkpoint refuses; all leaves are new.
            plain = self.replay.plain
            with plain.lent(self.name, unit_run.weights), plain.within(self.name):
                torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return [x.grad for x in unit_run.inputs], {name: w.grad for name, w in trained.items()}

    def other_input(self, way: int) -> Tensor:
        """Return the gradient of the hidden states, computed in another way; see `make`."""
        found = self.otherwise(way)[0][0]
        return torch.zeros(()) if found is None else found

    def other_output(self, way: int | None = None) -> Tensor:
        """Return the output of another run, perhaps in another way; see `make`."""
        with torch.no_grad(), self._precision(way):
            return self.again(way).outputs[0]

    def otherwise(self, way: int) -> Gradients:
        """Return the gradients of a run in another way, cached."""
        if way not in self.others:
            with torch.enable_grad(), self._precision(way):
                self.others[way] = self.gradients(self.again(way))
        return self.others[way]

    def _precision(self, way: int | None) -> AbstractContextManager[Any]:
        return without_autocast(self.args) if way == 0 else nullcontext()

    def _wider(self) -> torch.dtype:
        weights = self.replay.weights(self.name).values()
        dtypes = [w.dtype for w in weights if w.dtype in WIDER]
        return WIDER.get(dtypes[0] if dtypes else torch.float32, torch.float64)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def sum_of(name: str, calls: Sequence[Call], way: int) -> Tensor:
    """Return the gradient of a weight, summed over all calls of a unit, in another way."""
    found = [g for call in calls if (g := call.otherwise(way)[1][name]) is not None]
    return torch.stack(found).sum(0)


def _perturb(x: Tensor, way: int) -> Tensor:
    """Return a tensor with each element changed by one epsilon, up or down at random."""
    generator = torch.Generator().manual_seed(way)
    signs = torch.randint(2, x.shape, generator=generator).mul_(2).sub_(1).to(x.device, x.dtype)
    return x * signs.mul_(torch.finfo(x.dtype).eps).add_(1)

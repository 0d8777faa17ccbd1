"""Recording of a step: inputs and outputs of modules, and their gradients.

While it records, `nn.Module.__call__` is replaced and tensors have hooks. At other times nothing
is changed, and there is no overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

from ...compose.forward import rehearses
from ...dist import get_rank, get_world_size
from ...dist.errors import InvalidArgumentError
from ...verify.precision import model_precision, replaced
from ..keys import UNGRADED, Kind
from .descriptions import Description, Place, arguments_of, description_of, local_shard, tensors_of
from .folder import Line, Writer
from .lineage import Lineage


class Tape:
    """Records a rank's tensors of a step; made by `record`."""

    def __init__(
        self, writer: Writer, model: nn.Module | None, description: Description, patches: ExitStack
    ) -> None:
        self._writer, self._description, self._patches = writer, description, patches
        self._model: nn.Module | None = None
        self._names: dict[nn.Module, str] = {}
        self._parameters: dict[int, str] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._stack: list[str] = []
        self._ungraded = ""  # see `keys.UNGRADED`
        self._unlinked: list[list[int]] = [[]]  # for each running call, see `_unlinked`
        self._parameters_of: dict[str, list[str]] = {}
        self._with_gradient: set[int] = set()  # lines whose gradient was recorded
        self._lineage = Lineage()
        self._recorded: set[str] = set()
        self._hooked: set[tuple[Any, int]] = set()
        if model is not None:
            self._set_model(model)

    def _set_model(self, model: nn.Module) -> None:
        while isinstance(model, DistributedDataParallel):  # which only adds a prefix to names
            model = model.module
        self._model, self._names = model, {m: name for name, m in model.named_modules()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        for name in self._parameters.values():
            self._parameters_of.setdefault(name.rpartition(".")[0], []).append(name)
        wide = {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float64}
        self._patches.enter_context(model_precision(torch.float64 if wide else torch.float32))
        self.put_all(Kind.START, dict(model.named_parameters(remove_duplicate=False)))

    def put(self, kind: str, tensor: Tensor) -> None:
        """Record the loss or the norm of all gradients; it must be the same on every rank.

        A norm that `clip_grad_norm_` of torch has recorded stays.

        Args:
            kind: `"loss"` or `"norm"`.
            tensor: A scalar. If each rank computes a share of the loss, pass the global loss.

        Raises:
            InvalidArgumentError: Another kind, or not a tensor.
        """
        if kind not in (Kind.LOSS, Kind.NORM):
            raise InvalidArgumentError(f'put takes "{Kind.LOSS}" or "{Kind.NORM}", not {kind!r}')
        if not isinstance(tensor, Tensor):
            given = type(tensor).__name__
            raise InvalidArgumentError(f'put("{kind}", ...) takes a tensor, not a {given}')
        if kind == Kind.NORM and kind in self._recorded:
            return
        if kind == Kind.NORM:
            self.gradients()
        self._recorded.add(kind)
        self._add(Line(kind), tensor)

    def batch(self, entries: Mapping[str, Any], micro_batch: int = 0) -> None:
        """Record this rank's micro-batch, so that faults in the data are found."""
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                number = self._add(Line(Kind.DATA, name, call=micro_batch), entry)
                self._lineage.note(entry, number)

    def put_all(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Record gradients or weights of parameters, by plain names."""
        self._recorded.add(kind)
        for name, tensor in tensors.items():
            self._add(Line(kind, name), tensor, self._description.places.get(name))

    def gradients(self) -> None:
        """Record all gradients as they are now; called automatically before an optimizer step."""
        if self._model is not None and Kind.GRADIENT not in self._recorded:
            named = self._model.named_parameters(remove_duplicate=False)
            self.put_all(Kind.GRADIENT, {n: p.grad for n, p in named if p.grad is not None})

    def weights(self) -> None:
        """Record all weights as they are now; called at the end if an optimizer made a step."""
        if self._model is not None and Kind.WEIGHT not in self._recorded:
            self.put_all(Kind.WEIGHT, dict(self._model.named_parameters(remove_duplicate=False)))

    def _tied(self) -> dict[str, str]:
        """Return other name -> first name, for parameters that have several names."""
        model = self._model or nn.Module()
        named = model.named_parameters(remove_duplicate=False)
        return {n: first for n, p in named if (first := self._parameters.get(id(p), n)) != n}

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kw: Any) -> Any:
        """Call a module, and record its inputs and outputs."""
        if not self._stack and self._model is None and module not in self._names:
            self._set_model(module)
        name, chunk = self._names.get(module), self._description.chunk()
        if name is None or chunk < 0 or torch._C._current_graph_task_id() != -1:
            return original(module, *args, **kw)  # without a name, or recomputed in backward
        if not self._stack:
            self._ungraded = "" if torch.is_grad_enabled() else UNGRADED
        call = self._calls[name + self._ungraded, chunk]
        self._calls[name + self._ungraded, chunk] += 1
        for own, parameter in module._parameters.items():  # FSDP2 swaps them during a call
            self._parameters.setdefault(id(parameter), f"{name}.{own}".lstrip("."))
        with self._lineage.call():
            inputs: list[tuple[Tensor, int]] = []
            if (name, "in", chunk) not in self._description.unseen:
                given = arguments_of(module, args, kw)
                inputs = self._record_tensors(name, call, given, self._unlinked[-1])
            self._stack.append(name)
            self._unlinked.append(_unlinked(inputs))
            try:
                output = original(module, *args, **kw)
            finally:
                self._stack.pop()
                inside = self._unlinked.pop()
            if (name, "out", chunk) in self._description.unseen:
                return output
            results = self._record_tensors(name, call, tensors_of(output, "out"), inside)
        for tensor, number in results:
            self._lineage.note(tensor, number)  # its name after the call
        self._unlinked[-1] += _unlinked(results)
        return output

    def _record_tensors(
        self, name: str, call: int, tensors: Any, unlinked: list[int]
    ) -> list[tuple[Tensor, int]]:
        """Record tensors, in the order in which they were computed."""
        found = []
        order = sorted(tensors, key=lambda each: getattr(each[1].grad_fn, "_sequence_nr", int)())
        for item, tensor in order:
            line = Line(Kind.FORWARD, name, item + self._ungraded, call)
            found.append((tensor, self._record_tensor(line, tensor, unlinked)))
        return found

    def _record_tensor(self, line: Line, tensor: Tensor, unlinked: list[int]) -> int:
        line.inside = self._stack[-1] if self._stack else None
        line.stage = self._description.chunk()
        received = line.stage > 0 and not self._stack and line.item.startswith("in")
        # A tensor received from another rank is new, though it may reuse the same memory.
        line.same = -1 if received else self._lineage.line_of(tensor)
        if line.same >= 0:
            line.parents = [line.same]
            number = self._writer.add(line, None)
        else:
            self._follow_uses(line, tensor)
            if tensor.grad_fn is not None or not tensor.requires_grad:  # else another rank sent it
                line.parents = list(dict.fromkeys([*line.parents, *unlinked]))
            number = self._add(line, tensor)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                arrive, output = partial(self._record_gradient, number), tensor.output_nr
                if tensor.grad_fn is None:
                    tensor.register_hook(arrive)
                else:
                    tensor.grad_fn.register_prehook(lambda gradients: arrive(gradients[output]))
        self._lineage.note(tensor, number)
        return number

    def _follow_uses(self, line: Line, tensor: Tensor) -> None:
        """Note a tensor's sources, and hook nodes to record its term of parameters' gradients."""
        user = line.name if line.item.startswith("out") else line.inside or ""
        lines, parameters = self._lineage.parents(tensor)
        line.parents = list(dict.fromkeys(lines))
        if not tensor.requires_grad and line.item.startswith("out"):
            line.uses += self._parameters_of.get(line.name, [])
        for use in parameters:
            if name := self._parameters.get(id(use.source)):
                line.uses.append(name)
                if (use.node, use.place) not in self._hooked:
                    self._hooked.add((use.node, use.place))
                    term = Line(Kind.TERM, name, user, max(self._calls["", line.stage] - 1, 0))
                    # Not `use` itself: the node's hook would then hold the node.
                    use.node.register_hook(partial(self._record_term, term, use.place))

    def _record_term(
        self, term: Line, at: int, gradients: tuple[Tensor | None, ...], _: Any
    ) -> None:
        added = gradients[at]
        if added is not None:
            self._add(replace(term), added, self._description.places.get(term.name))

    def _release(self) -> None:
        """Drop the graph: its hooks hold this tape, a cycle that garbage collection cannot see."""
        self._lineage = Lineage()
        self._hooked.clear()

    def _record_gradient(self, number: int, gradient: Tensor | None) -> None:
        if number in self._with_gradient or gradient is None:
            return
        self._with_gradient.add(number)
        known = self._writer.lines[number]
        line = Line(Kind.BACKWARD, known.name, known.item, known.call, parents=[number])
        line.sums = known.item.startswith("in") and known.name in self._description.terms
        self._add(line, gradient)

    def _add(self, line: Line, tensor: Tensor, place: Place | None = None) -> int:
        if line.kind == Kind.LOSS and tensor.requires_grad:
            line.parents = self._lineage.parents(tensor)[0] + self._unlinked[0]
        local, own_place, is_term = local_shard(tensor.detach())
        line.sums |= is_term
        line.place = place if own_place is None else own_place
        if local.is_complex():
            local = torch.view_as_real(local.resolve_conj())
            line.place = None
        line.dtype, line.shape = str(local.dtype).removeprefix("torch."), list(local.shape)
        return self._writer.add(line, local)


def _unlinked(seen: Iterable[tuple[Tensor, int]]) -> list[int]:
    """Return the lines of floating tensors without gradient: autograd does not know their users."""
    return [n for t, n in seen if t.is_floating_point() and not t.requires_grad]


@contextmanager
def _calls_to(called: Callable[..., Any]) -> Iterator[None]:
    """Replace every call of a module by `called(original, module, *args, **kwargs)`."""
    original: Callable[..., Any] = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Compiled code is one unit, and a rehearsal does not train.
        if torch.compiler.is_compiling() or rehearses():
            return original(self, *args, **kwargs)
        return called(original, self, *args, **kwargs)

    with replaced(nn.Module, __call__=call):
        yield


@contextmanager
def _following(tape: Tape) -> Iterator[None]:
    """Let a `Tape` record gradients before clipping and optimizer steps, and the new weights."""
    steps: list[None] = []
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(*args: Any, **kwargs: Any) -> Tensor:
        tape.gradients()
        total = clip(*args, **kwargs)
        tape.put(Kind.NORM, getattr(total, "full_tensor", lambda: total)())
        return total

    hooks = (
        optimizer.register_optimizer_step_pre_hook(lambda *_: tape.gradients()),
        optimizer.register_optimizer_step_post_hook(lambda *_: steps.append(None)),
    )
    try:
        with replaced(torch.nn.utils, clip_grad_norm_=clipped):
            yield
        tape.gradients()
        if steps:
            tape.weights()
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def record(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    describe: Mapping[str, Any] | Description | None = None,
    step: int = 0,
) -> Iterator[Tape]:
    """Record a training step of this rank.

    Records the weights before the step, the inputs and outputs of every module, their gradients,
    the parameters' gradients, and the weights after an optimizer's step. Meanwhile, a model whose
    weights are all float64 skips its casts to float32.

    Args:
        folder: The same for all ranks of a run; created if missing.
        model: The module whose names are recorded, wrapped or not; None is the first one called.
        describe: This rank's shard of the global batch, if it lacks some of it: axis -> (indices,
            total), such as `{"rows": (range(4, 8), 8)}`; for several micro-batches, a list of
            indices. DTensors describe themselves.
        step: Number of the step, if several are recorded.

    Yields:
        The tape, which can record more: `tape.put("loss", loss)`.

    Raises:
        InvalidArgumentError: `model` is no module, or `describe` not a mapping of this form.
    """
    if not isinstance(model, nn.Module | None):
        raise InvalidArgumentError(
            f"record takes a module, not a {type(model).__name__}; for a stage of a pipeline, pass "
            "its layers: nn.ModuleDict(stage.submod.named_children())"
        )
    described = description_of(describe)
    header: dict[str, Any] = {
        "step": step, "world_size": get_world_size(), "torch": torch.__version__,
        "micro_batches": described.micro_batches, "groups": described.groups,
        "weight": described.weight, "shared": described.shared,
        "axes": {name: [axis.total, axis.shards] for name, axis in described.axes.items()},
    }  # fmt: skip
    writer = Writer(Path(folder), get_rank(), header)
    try:
        with ExitStack() as stack:
            tape = Tape(writer, model, described, stack)
            stack.callback(tape._release)
            stack.enter_context(_calls_to(tape._call))
            stack.enter_context(_following(tape))
            yield tape
        writer.header["tied"] = tape._tied()
    except BaseException as error:
        writer.close(f"{type(error).__name__}: {error}"[:500] or "stopped")
        raise
    writer.close()

"""Measurements of a hollow step by block: memory, saved activations, operations and messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import flop_registry

from ...compose.recompute import is_selected
from ...dist.building import tensors_in
from ..description import Affine, Behaviour, Parameter, Sent, Work

aten = torch.ops.aten
# Operations of c10d that have another name in `scaletorch.dist`.
_OPERATIONS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
HELD = ("kept", "shared", "left", "entered", "handed")  # bytes of a block; see `Behaviour`

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")
FORWARD, BACKWARD = PHASES
Operation = tuple[str, float, float]  # kind, flops, bytes moved


@dataclass(slots=True)
class Seen:
    """Measurements of one phase of one block."""

    work: list[Operation] = field(default_factory=list)
    sent: list[tuple[str, str, float]] = field(default_factory=list)  # axis, operation, bytes
    base: int = -1  # bytes alive when the phase began
    peak: int = 0  # most bytes alive during it

    @property
    def taken(self) -> int:
        """Peak bytes above those alive when the phase began."""
        return max(self.peak - self.base, 0)


class Meter:
    """Measures a step; block 0 is everything before the layers, block `last` everything after them.

    `axes` has this rank's groups; others' traffic is not counted. `selective` layers keep what
    selective recomputation keeps, which autograd's hooks do not see.
    """

    def __init__(
        self, axes: Mapping[str, ProcessGroup | None], last: int, *, selective: bool = False
    ) -> None:
        self._last, self._selective = last, selective
        self.seen: dict[tuple[int, Phase], Seen] = defaultdict(Seen)
        self.held: dict[int, Counter[str]] = defaultdict(Counter)  # of `HELD`
        self._axes: dict[str, str] = {}
        for axis, group in axes.items():
            if group is not None:  # if several axes have the same group, count for the first
                self._axes.setdefault(group.group_name, axis)
        self._block, self._phase, self._on = 0, FORWARD, False
        self._events: list[tuple[Seen, int, int]] = []  # phase, storage, change of bytes
        self._born: dict[int, int] = {}  # storage -> block
        self._inputs: dict[int, int] = {}  # block -> storage
        self._multiplied: dict[int, int] = {}  # storage of a linear layer's input -> block
        self._counted: set[int] = set()  # storages of parameters, and those already counted as kept
        self._added: tuple[int, int] | None = None  # (storage of an operand, its event)

    @contextmanager
    def watch(
        self, model: nn.Module, chosen: Mapping[int, str], latest: list[Any]
    ) -> Iterator[None]:
        """Measure a step of a model; `latest[0]` is set to the output of each layer that runs."""
        first, *_, final = [*chosen, *chosen]

        def begin(*_: Any) -> None:
            self._counted |= {p.untyped_storage()._cdata for p in model.parameters()}
            self._on = True
            self._enter(0, FORWARD)

        def before(kind: int, _: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = next(tensors_in((args, kwargs)), None)
            if hidden is not None:
                self._come_in(kind, hidden)
                if kind == first:
                    self._when_gradient(hidden, 0)
            self._enter(kind, FORWARD)

        def after(kind: int, _: nn.Module, args: Any, output: Any) -> None:
            latest[0] = output
            hidden = next(tensors_in(output), None)
            if hidden is not None:
                self.held[kind]["handed"] = bytes_of([hidden])
                self._come_in(self._last, hidden)
                self._when_gradient(hidden, kind)
            if kind == final:
                self._enter(self._last, FORWARD)

        with ExitStack() as stack:
            for kind, name in chosen.items():
                layer = model.get_submodule(name)
                one = layer.register_forward_pre_hook(partial(before, kind), with_kwargs=True)
                two = layer.register_forward_hook(partial(after, kind))
                stack.callback(one.remove)
                stack.callback(two.remove)
            for linear in filter(is_put_off, model.modules()):
                stack.callback(linear.register_forward_hook(self._multiply).remove)
            stack.callback(model.register_forward_pre_hook(begin).remove)
            stack.enter_context(saved_tensors_hooks(self._keep, lambda kept: kept))
            yield
        self._on = False
        self._find_peaks()

    def _find_peaks(self) -> None:
        """Replay the memory events without storages that stay, such as parameter gradients."""
        alive: dict[int, int] = {}
        for index, (_, key, change) in enumerate(self._events):
            if change > 0:
                alive[key] = index
            else:
                alive.pop(key, None)
        staying, live = {*alive.values()}, 0
        for index, (seen, _, change) in enumerate(self._events):
            if index not in staying:
                seen.base = live if seen.base < 0 else seen.base
                live += change
                seen.peak = max(seen.peak, live)

    def _enter(self, block: int, phase: Phase) -> None:
        self._block, self._phase = block, phase

    def _come_in(self, block: int, hidden: Tensor) -> None:
        storage = hidden.untyped_storage()
        self.held[block]["entered"], self._inputs[block] = storage.nbytes(), storage._cdata

    def _when_gradient(self, tensor: Tensor, block: int) -> None:
        """Switch to the backward of a block when a tensor's gradient arrives."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._enter(block, BACKWARD))

    def _multiply(self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Count input and output gradient of a linear layer with a deferrable weight gradient."""
        storage, block = args[0].untyped_storage(), self._block
        if self._on and self._phase == FORWARD and output.requires_grad:
            if self._multiplied.get(storage._cdata) != block:
                self._multiplied[storage._cdata] = block
                self.held[block]["left"] += storage.nbytes()
            self.held[block]["left"] += bytes_of([output])

    def operation(
        self, func: Any, args: Any, ins: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """Count an operation for the running block."""
        self._added = None
        if self._on:
            if self._phase == FORWARD and torch._C._current_graph_task_id() != -1:
                self._enter(self._last, BACKWARD)
            in_layer = self._phase == FORWARD and 0 < self._block < self._last
            if self._selective and in_layer and is_selected(func):
                for each in outs:
                    self._keep(each)
            moved = float(bytes_of(ins) + bytes_of(outs))
            self.seen[self._block, self._phase].work.append(
                (*flops_of(func, args, ins, outs), moved)
            )
            if self._phase == BACKWARD and func is aten.add.Tensor and self._events:
                self._added = ins[0].untyped_storage()._cdata, len(self._events) - 1

    def collective(self, func: Any, group: ProcessGroup, tensors: Sequence[Tensor]) -> None:
        """Count a collective for the running block."""
        axis, raw = self._axes.get(group.group_name), func._schema.name.removeprefix("c10d::")
        received = raw.startswith(("recv", "barrier"))  # counted at the sender; not in a step
        if self._on and group.size() > 1 and axis is not None and not received:
            self.seen[self._block, self._phase].sent.append(
                (axis, *sent_by(raw.strip("_"), tensors, group.size()))
            )

    def memory(self, key: int, change: int) -> None:
        """Record an allocation or, with a negative change, a release."""
        if self._on and (change > 0 or self._born.get(key, -1) >= 0):
            at = len(self._events)
            if change < 0 and self._added is not None and self._added[0] == key:
                # The operand was autograd's alone: without a dispatch mode it would add in place.
                # Without this, plans of mixtures of experts are 1 to 4 % too large.
                at = self._added[1]
            seen = self.seen[self._block, self._phase]
            self._events.insert(at, (seen, key, change))
        self._born[key] = self._block if self._on and change > 0 else -1
        self._multiplied.pop(key, None)  # another storage may have its address

    def _keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd keeps; it is shared if it was made before the layers."""
        storage, block = tensor.untyped_storage(), self._block
        key = storage._cdata
        if self._on and key not in self._counted:
            self._counted.add(key)
            early = self._born.get(key, -1) < 1 and self._inputs.get(block) != key
            shared = early and 0 < block < self._last  # such as rotary angles or a mask
            self.held[block]["shared" if shared else "kept"] += storage.nbytes()
        return tensor


def is_put_off(module: nn.Module) -> bool:
    """Return whether a split backward defers a weight's gradient to its second half."""
    return (  # it does for `nn.Linear`'s own forward, which buckets may have wrapped in a partial
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and isinstance(vars(module).get("forward", partial(module.forward)), partial)
        and module.weight.requires_grad
    )


def behaviour(
    kind: int, rows: tuple[int, int], pair: Sequence[Meter], parameters: Sequence[Parameter]
) -> Behaviour:
    """Return the behaviour of a kind of block, from two steps with different numbers of rows."""
    slope = 1 / (rows[1] - rows[0])

    def line(figures: Iterator[float]) -> Affine:
        low, high = figures
        return Affine(low - slope * (high - low) * rows[0], slope * (high - low))

    def peak(meter: Meter) -> int:
        own = meter.held[kind]
        return max(meter.seen[kind, FORWARD].taken - own["kept"] - own["shared"], 0)

    sent: list[Sent] = []
    work: list[Work] = []
    for phase in PHASES:
        both = [each.seen[kind, phase] for each in pair]
        calls = zip(*(sorted(each.sent) for each in both), strict=False)
        for (axis, name), same in groupby(calls, key=lambda each: each[0][:2]):
            found = [*same]
            size = line(sum(each[side][2] for each in found) for side in (0, 1))
            sent.append(Sent(axis, name, phase, len(found), size))
        for sort in sorted({each[0] for own in both for each in own.work}):
            for pairs in _alike(*([e for e in own.work if e[0] == sort] for own in both)):
                flops = line(sum(each[1] for each in side) for side in pairs)
                moved = line(sum(each[2] for each in side) for side in pairs)
                work.append(Work(sort, max(map(len, pairs)), flops, moved, phase))
    return Behaviour(
        tuple(parameters),
        forward_peak=line(peak(each) for each in pair),
        backward_peak=line(each.seen[kind, BACKWARD].taken for each in pair),
        sent=tuple(sent),
        work=tuple(work),
        **{name: line(each.held[kind][name] for each in pair) for name in HELD},
    )


def _alike(low: list[Operation], high: list[Operation]) -> Iterator[list[list[Operation]]]:
    """Yield operations of the same size in both steps; all together if their number differs."""
    if len(low) != len(high):
        yield [low, high]
        return

    def size(both: tuple[Operation, Operation]) -> tuple[float, int]:
        _, flops, moved = both[0]
        return flops, 0 if flops else int(moved).bit_length() // 3  # within a factor of 8

    for _, group in groupby(sorted(zip(low, high, strict=True), key=size), key=size):
        yield [[*side] for side in zip(*group, strict=True)]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the total bytes of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def flops_of(
    func: Any, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[str, float]:
    """Return an operation's kind, as in `Work.operation`, and its flops."""
    if "attention" in func._schema.name:
        return "attention", _attention(func, inputs, args)
    if func is aten._grouped_mm.default:  # each token with its expert
        a, b = inputs[:2]
        return "matmul", 2.0 * a.numel() * b.shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return "other", 0.0
    output = outputs[0] if len(outputs) == 1 else tuple(outputs)
    return "matmul", float(formula(*args, out_val=output))


def _attention(func: Any, inputs: Sequence[Tensor], args: Any) -> float:
    """Return the flops of an attention; a causal one counts half."""
    backward = "backward" in func._schema.name
    query, key, value = inputs[1:4] if backward else inputs[:3]
    rows = query.shape[:-1].numel()
    products = rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]) * 2.0
    names = [argument.name for argument in func._schema.arguments]
    causal = dict(zip(names, args, strict=False)).get("is_causal", False)
    return products * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)


def sent_by(raw: str, tensors: Sequence[Tensor], size: int) -> tuple[str, float]:
    """Return a collective's name in `scaletorch.dist` and the bytes that a rank of a ring sends."""
    operation = raw.removesuffix("_base")
    operation = _OPERATIONS.get(operation, operation)
    if operation == "send":
        return operation, float(bytes_of(tensors[:1]))
    whole = max((bytes_of([tensor]) for tensor in tensors), default=0)
    if raw in {"allgather", "reduce_scatter", "alltoall"}:  # lists with one tensor for each rank
        whole = max(bytes_of(tensors) // 2, bytes_of(tensors) * size // (size + 1))
    turns = 2 if operation == "all_reduce" else 1
    return operation, turns * whole * (size - 1) / size

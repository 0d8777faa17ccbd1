"""What a step does, block by block: memory, what autograd keeps, operations, messages."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from ...compose.recompute import is_selected
from .counting import aten, bytes_of, flops_of, group_of, sent_by, sort_of

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")
FORWARD, BACKWARD = PHASES
Place = tuple[int, Phase]  # a block and a phase
Operation = tuple[str, float, float]  # sort, flops, bytes moved
Event = tuple[Place, int, int, int]  # where, which storage, how many bytes, its how-manieth birth


@dataclass(slots=True)
class Seen:
    """What one phase of one block does.

    Attributes:
        work: (sort, flops, bytes moved) of each operation.
        sent: (axis, operation, bytes) of each collective.
        again: How many of these come before the last tensor that autograd keeps: those that a layer
            makes again when it runs again.
    """

    work: list[Operation] = field(default_factory=list)
    sent: list[tuple[str, str, float]] = field(default_factory=list)
    again: int = 0


class Made(NamedTuple):
    """A gradient, and bytes that are alive then.

    Attributes:
        name: Of the parameter.
        comes: When it comes.
        taken: When it has been taken over, and its own memory is gone.
        most: From then on, until the next one.
    """

    name: str
    comes: int
    taken: int
    most: int

    def going_on(self, live: int, *, settled: bool) -> Made:
        """Return it with so much alive later; `settled`: after it has been taken over."""
        if settled:
            return self._replace(most=max(self.most, live))
        return self._replace(taken=live, most=live)


class Observed:
    """Watches hollow code: what stands before the layers is block 0, behind them block `last`.

    Args:
        axes: The groups of this rank by axis; what is sent over others is not counted.
        last: The block behind the layers.
        selective: Layers keep what selective recomputation keeps, which no hook of autograd sees.
    """

    def __init__(
        self, axes: Mapping[str, ProcessGroup | None], last: int, *, selective: bool = False
    ) -> None:
        self.last, self._selective = last, selective
        self.seen: dict[Place, Seen] = defaultdict(Seen)
        self.bases: dict[Place, int] = {}  # bytes alive when a place was entered
        self.peaks: dict[Place, int] = {}  # the most bytes alive there
        self.kept: Counter[int] = Counter()  # block -> bytes
        self.kept_inputs: Counter[int] = Counter()  # block -> bytes of `kept` that are its input
        self.shared: Counter[int] = Counter()  # block -> bytes that other layers keep too
        self.left: Counter[int] = Counter()  # block -> bytes for the second half of a backward
        self.parted: Counter[int] = Counter()  # block -> the most above what it kept in the first
        self.made: dict[int, list[Made]] = defaultdict(list)  # block -> in order
        self.entered: dict[int, int] = {}  # block -> bytes of its input
        self.handed: dict[int, int] = {}  # block -> bytes of its output
        self._born: dict[int, int] = {}  # storage -> block
        self._births: Counter[int] = Counter()  # storage -> how often one was there
        self._leaving: set[tuple[int, int, int]] = set()  # block, storage, its birth
        self._inputs: dict[int, int] = {}  # block -> storage
        self._put_off: set[int] = set()  # storages of gradients that linear layers are given
        self._held: set[int] = set()  # storages that are counted
        self._axes: dict[str, str] = {}
        for axis, group in axes.items():
            if group is not None:  # the first axis with these ranks, if several have them
                self._axes.setdefault(group.group_name, axis)
        self._block, self._phase, self._on = 0, FORWARD, False
        self._events: list[Event] = []
        self._parameters: set[int] = set()
        self._gradients: list[tuple[int, Place, str]] = []  # before which event, where, whose
        self._added: tuple[int, int] | None = None  # what a sum was added to, and its own event

    def begin(self, model: nn.Module) -> None:
        """Begin with the forward of a model, whose parameters are no activations."""
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._on = True
        self.enter(0, FORWARD)

    def finish(self) -> None:
        """Stop watching; what is alive now, such as gradients, is nothing that a block needs."""
        self._on = False
        alive: dict[int, int] = {}
        for index, (_, key, change, _) in enumerate(self._events):
            if change > 0:
                alive[key] = index
            else:
                alive.pop(key, None)
        staying = {*alive.values()}
        gradients = deque(self._gradients)
        live, settled = 0, True
        for index, (place, _, change, _) in enumerate(self._events):
            while gradients and gradients[0][0] <= index:
                _, (block, _), name = gradients.popleft()
                self.made[block].append(Made(name, live, live, live))
                settled = False
            if index not in staying:
                self.bases.setdefault(place, live)
                live += change
                self.peaks[place] = max(self.peaks.get(place, 0), live)
                settled |= change > 0
                if (made := self.made[place[0]]) and place[1] == BACKWARD:
                    made[-1] = made[-1].going_on(live, settled=settled)
        for _, (block, _), name in gradients:
            self.made[block].append(Made(name, live, live, live))
        self._part([e for at, e in enumerate(self._events) if at not in staying])

    def _part(self, events: Sequence[Event]) -> None:
        """Follow what backwards need if each leaves its weights' gradients for later."""
        now = Counter[int]()
        for (block, phase), key, change, birth in events:
            leaves = change < 0 and (block, key, birth) in self._leaving
            if phase == BACKWARD and not leaves:
                now[block] += change
                self.parted[block] = max(self.parted[block], now[block])

    def enter(self, block: int, phase: Phase) -> None:
        """Go on with another block."""
        self._block, self._phase = block, phase

    def come_in(self, block: int, hidden: Tensor) -> None:
        """Note a block's input."""
        storage = hidden.untyped_storage()
        self.entered[block], self._inputs[block] = storage.nbytes(), storage._cdata

    def go_out(self, block: int, hidden: Tensor) -> None:
        """Note a block's output."""
        self.handed[block] = bytes_of([hidden])
        self.come_in(self.last, hidden)

    def leave(self, block: int, tensor: Tensor) -> None:
        """Note what a block's first half of a backward would leave for the second."""
        storage = tensor.untyped_storage()
        key = block, storage._cdata, self._births[storage._cdata]
        if self._on and key not in self._leaving:
            self._leaving.add(key)
            self.left[block] += storage.nbytes()

    def ran(self, output: Tensor) -> None:
        """Note that a linear layer has run whose weight's gradient may be put off."""
        block = self._block

        def arrived(gradient: Tensor) -> None:
            self._put_off.add(gradient.untyped_storage()._cdata)
            self.leave(block, gradient)

        if self._on and self._phase == FORWARD and output.requires_grad:
            output.register_hook(arrived)

    def _multiply(self, factors: Sequence[Tensor]) -> None:
        """Note what is multiplied with a gradient to be put off: the layer's input, or its weight.

        It may have been made again since the forward, and is looked for here therefore.
        """
        keys = [each.untyped_storage()._cdata for each in factors]
        if not self._put_off.isdisjoint(keys):
            for key, each in zip(keys, factors, strict=True):
                if key not in self._parameters:
                    self.leave(self._block, each)

    def operation(
        self, func: Any, args: Any, ins: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """Count an operation for the block that runs."""
        self._added = None
        if self._on:
            if self._phase == FORWARD and torch._C._current_graph_task_id() != -1:
                self.enter(self.last, BACKWARD)
            in_layer = self._phase == FORWARD and 0 < self._block < self.last
            if self._selective and in_layer and is_selected(func):
                for each in outs:
                    self._pack(each)
            moved, sort = float(bytes_of(ins) + bytes_of(outs)), sort_of(func)
            self._now.work.append((sort, flops_of(func, args, ins, outs), moved))
            if self._phase == BACKWARD and sort == "matmul":
                self._multiply([each for each in args if isinstance(each, Tensor)][-2:])
            if self._phase == BACKWARD and func is aten.add.Tensor and self._events:
                self._added = ins[0].untyped_storage()._cdata, len(self._events) - 1

    def gradient(self, name: str) -> None:
        """Note that a parameter's gradient is made, unless that was noted just before."""
        place = self._block, self._phase
        if self._on and (place, name) not in [each[1:] for each in self._gradients[-1:]]:
            self._gradients.append((len(self._events), place, name))

    def collective(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Count a call for the block that runs."""
        group = group_of(args)
        if self._on and group is not None and group.size() > 1:
            axis = self._axes.get(group.group_name)
            if axis is not None:
                self._now.sent.append((axis, *sent_by(func, tensors, group.size())))

    def memory(self, key: int, change: int) -> None:
        """Follow what is alive."""
        self._births[key] += change > 0
        self._put_off.discard(key)
        if self._on and (change > 0 or self._born.get(key, -1) >= 0):
            place, at = (self._block, self._phase), len(self._events)
            if change < 0 and self._added is not None and self._added[0] == key:
                # Nobody else had it: autograd adds in place, but where a dispatch mode looks on.
                at = self._added[1]
            self._events.insert(at, (place, key, change, self._births[key]))
        self._born[key] = self._block if self._on and change > 0 else -1

    def keeping(self) -> AbstractContextManager[None]:
        """Note what autograd keeps."""
        return saved_tensors_hooks(self._pack, lambda kept: kept)

    @property
    def _now(self) -> Seen:
        return self.seen[self._block, self._phase]

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._on:
            self._now.again = len(self._now.sent)
        if self._on and key not in self._parameters and key not in self._held:
            self._held.add(key)
            to = self.shared if self._is_shared(key) else self.kept
            to[self._block] += storage.nbytes()
            if key == self._inputs.get(self._block):
                self.kept_inputs[self._block] += storage.nbytes()
        return tensor

    def _is_shared(self, key: int) -> bool:
        """Return whether a layer keeps what is made before the layers, such as angles or a mask."""
        made_before = self._born.get(key, -1) < 1 and self._inputs.get(self._block) != key
        return made_before and 0 < self._block < self.last

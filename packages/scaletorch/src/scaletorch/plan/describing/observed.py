"""What a step does, block by block: memory, what autograd keeps, operations, messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

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
Event = tuple[Place, int, int]  # where, which storage, how many bytes


@dataclass(slots=True)
class Seen:
    """What one phase of one block does.

    Attributes:
        work: (sort, flops, bytes moved) of each operation.
        sent: (axis, operation, bytes) of each collective.
    """

    work: list[Operation] = field(default_factory=list)
    sent: list[tuple[str, str, float]] = field(default_factory=list)


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
        self.entered: dict[int, int] = {}  # block -> bytes of its input
        self.handed: dict[int, int] = {}  # block -> bytes of its output
        self._born: dict[int, int] = {}  # storage -> block
        self._multiplied: set[tuple[int, int]] = set()  # block, storage of a linear layer's input
        self._inputs: dict[int, int] = {}  # block -> storage
        self._held: set[int] = set()  # storages that are counted
        self._axes: dict[str, str] = {}
        for axis, group in axes.items():
            if group is not None:  # the first axis with these ranks, if several have them
                self._axes.setdefault(group.group_name, axis)
        self._block, self._phase, self._on = 0, FORWARD, False
        self._events: list[Event] = []
        self._parameters: set[int] = set()
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
        for index, (_, key, change) in enumerate(self._events):
            if change > 0:
                alive[key] = index
            else:
                alive.pop(key, None)
        staying, live = {*alive.values()}, 0
        for index, (place, _, change) in enumerate(self._events):
            if index not in staying:
                self.bases.setdefault(place, live)
                live += change
                self.peaks[place] = max(self.peaks.get(place, 0), live)

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

    def ran(self, given: Tensor, output: Tensor) -> None:
        """Note that a linear layer has run whose weight's gradient may be put off."""
        key = self._block, given.untyped_storage()._cdata
        if self._on and self._phase == FORWARD and output.requires_grad:
            if key not in self._multiplied:
                self._multiplied.add(key)
                self.left[self._block] += given.untyped_storage().nbytes()
            self.left[self._block] += bytes_of([output])

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
            if self._phase == BACKWARD and func is aten.add.Tensor and self._events:
                self._added = ins[0].untyped_storage()._cdata, len(self._events) - 1

    def collective(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Count a call for the block that runs."""
        group = group_of(args)
        if self._on and group is not None and group.size() > 1:
            axis = self._axes.get(group.group_name)
            if axis is not None:
                self._now.sent.append((axis, *sent_by(func, tensors, group.size())))

    def memory(self, key: int, change: int) -> None:
        """Follow what is alive."""
        if self._on and (change > 0 or self._born.get(key, -1) >= 0):
            place, at = (self._block, self._phase), len(self._events)
            if change < 0 and self._added is not None and self._added[0] == key:
                # Nobody else had it: autograd adds in place, but where a dispatch mode looks on.
                at = self._added[1]
            self._events.insert(at, (place, key, change))
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

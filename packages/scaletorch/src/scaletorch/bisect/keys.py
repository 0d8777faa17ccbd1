"""Keys of the tensors to compare, the same in every run and on every rank."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of a recorded tensor, in the order of a step."""

    DATA = "data"  # an entry of the batch
    START = "start"  # a parameter before the step
    FORWARD = "forward"  # an input or output of a module
    LOSS = "loss"
    BACKWARD = "backward"  # the gradient of an input or output
    TERM = "term"  # one module's term of a rank's gradient of a parameter
    GRADIENT = "gradient"  # of a parameter
    NORM = "norm"  # of all gradients
    WEIGHT = "weight"  # a parameter after the step


# The results of training, and its initial weights.
FINAL = (Kind.START, Kind.LOSS, Kind.GRADIENT, Kind.NORM, Kind.WEIGHT)
UNGRADED = " under no_grad"  # suffix of items in calls without gradients


class Key(NamedTuple):
    """A tensor of a step, independent of the ranks that hold shards of it.

    Attributes:
        step: 0-based.
        kind: A `Kind`.
        name: The module's or the parameter's; '' is the model.
        item: The module's tensor: 'in.0', 'in.mask', 'out'. For a term, the module that adds it.
        call: Number of the module's call in one forward, 0-based.
    """

    step: int
    kind: str
    name: str
    item: str = ""
    call: int = 0

    @property
    def is_output(self) -> bool:
        """True if it is the output of a module."""
        return self.kind == Kind.FORWARD and self.item.startswith("out")

    def __str__(self) -> str:
        """Return the key in words."""
        if self.kind in (Kind.LOSS, Kind.NORM):
            return f"the {self.kind}"
        if self.kind in (Kind.DATA, Kind.START):
            return f"{self.name} {'of the batch' if self.kind == Kind.DATA else 'before the step'}"
        if self.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return f"{self.kind} {self.item + ' of ' if self.item else ''}{self.name}"
        side, _, which = self.item.partition(".")
        what = ("input" if side == "in" else "output") + (f" {which}" if which else "")
        module = f"{self.name or 'the model'}{f' (call {self.call})' if self.call else ''}"
        return f"{'gradient of ' if self.kind == Kind.BACKWARD else ''}{what} of {module}"

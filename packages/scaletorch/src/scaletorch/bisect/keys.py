"""Keys of the tensors to compare: names that are the same in every run, on every rank."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
GRADIENT, NORM, WEIGHT, LOSS = "gradient", "norm", "weight", "loss"
START, DATA, TERM, SHARE = "start", "data", "term", "share"
FINAL = (START, LOSS, GRADIENT, NORM, WEIGHT)  # what training comes to, and what it began with
UNGRADED = " under no_grad"  # behind the items of calls that nothing is learned from


class Key(NamedTuple):
    """A tensor of a step, whichever ranks hold parts of it.

    Attributes:
        step: 0-based.
        kind: FORWARD for what goes into a module or comes out of it, BACKWARD for the gradient of
            that, GRADIENT and WEIGHT of a parameter, START for its value before the step,
            NORM and LOSS, DATA for an entry of the batch, TERM for what a module adds to a rank's
            gradient of a parameter, SHARE for what it adds to that of a tensor: the user is in
            `item`, behind a blank.
        name: The module's or the parameter's; '' is the model.
        item: Which of a module's tensors: 'in.0', 'in.mask', 'out'.
        call: Which call of the module in one forward.
    """

    step: int
    kind: str
    name: str
    item: str = ""
    call: int = 0

    def __str__(self) -> str:
        """Say it in words."""
        if self.kind in (NORM, LOSS):
            return f"the {self.kind}"
        if self.kind == DATA:
            return f"{self.name} of the batch"
        if self.kind == START:
            return f"{self.name} before the step"
        if self.kind not in (FORWARD, BACKWARD):
            return f"{self.kind} {self.item + ' of ' if self.item else ''}{self.name}"
        side, _, which = self.item.partition(".")
        what = ("input" if side == "in" else "output") + (f" {which}" if which else "")
        of = f"{self.name or 'the model'}{f' (call {self.call})' if self.call else ''}"
        return f"{'gradient of ' if self.kind == BACKWARD else ''}{what} of {of}"

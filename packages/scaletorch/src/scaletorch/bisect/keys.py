"""Keys of the tensors to compare, the same in every run and on every rank."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
GRADIENT, NORM, WEIGHT, LOSS = "gradient", "norm", "weight", "loss"
START, DATA, TERM, SHARE = "start", "data", "term", "share"
FINAL = (START, LOSS, GRADIENT, NORM, WEIGHT)  # the results of training, and its initial weights
UNGRADED = " under no_grad"  # suffix of items in calls without gradients


class Key(NamedTuple):
    """A tensor of a step, independent of the ranks that hold shards of it.

    Attributes:
        step: 0-based.
        kind: FORWARD for an input or output of a module, BACKWARD for its gradient, GRADIENT and
            WEIGHT of a parameter, START for the parameter's value before the step, NORM and LOSS,
            DATA for an entry of the batch, TERM for a module's contribution to a rank's gradient
            of a parameter, SHARE for its contribution to the gradient of an input or output. For
            SHARE, `item` has the name of the contributing module at its end, after a blank.
        name: The module's or the parameter's; '' is the model.
        item: The module's tensor: 'in.0', 'in.mask', 'out'. For TERM the contributing module.
        call: Number of the module's call in one forward, 0-based.
    """

    step: int
    kind: str
    name: str
    item: str = ""
    call: int = 0

    def __str__(self) -> str:
        """Return the key in words."""
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
        module = f"{self.name or 'the model'}{f' (call {self.call})' if self.call else ''}"
        return f"{'gradient of ' if self.kind == BACKWARD else ''}{what} of {module}"

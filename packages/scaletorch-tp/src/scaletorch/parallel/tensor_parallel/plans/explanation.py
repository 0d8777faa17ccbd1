"""What a plan does to a model as plain data and as a table: shapes, communication, bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# Sent by each rank of a ring, in units of the tensor times (tp - 1) / tp.
_RING = {"all_reduce": 2, "all_gather": 1}


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    """What ranks hold of a parameter.

    Attributes:
        name: The parameter's; every name of a tied one is listed.
        style: Its module's style; "" where the plan does not name that.
        shape: The whole's.
        dim: The dim it is sharded along; None where every rank has the whole.
        local_shapes: Each rank's.
    """

    name: str
    style: str
    shape: tuple[int, ...]
    dim: int | None
    local_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective of a step.

    Attributes:
        module: Where it happens.
        phase: "forward" or "backward".
        operation: "all_reduce" or "all_gather".
        tensor: What is summed or joined.
        per_token: Elements of the result for each token (batch times sequence length).
        fixed: Elements of the result whatever the number of tokens.
    """

    module: str
    phase: Literal["forward", "backward"]
    operation: Literal["all_reduce", "all_gather"]
    tensor: str
    per_token: int = 0
    fixed: int = 0

    def bytes(self, tokens: int, element_size: int) -> int:
        """Return the result's bytes, for so many tokens (B x L) and bytes an element."""
        return (self.per_token * tokens + self.fixed) * element_size


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan does to a model. `dataclasses.asdict` of it is plain data; `str` is a table.

    Attributes:
        tp: Number of ranks.
        parameters: In the model's order.
        communications: Of one forward and backward, in the model's order.
    """

    tp: int
    parameters: tuple[ExplainedParameter, ...]
    communications: tuple[Communication, ...]

    def bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes of all communicated tensors of one forward and backward."""
        return sum(c.bytes(tokens, element_size) for c in self.communications)

    def bytes_by_layer(self, tokens: int, element_size: int) -> dict[str, int]:
        """Return the same for each numbered layer, and each module outside of these."""
        layers: Counter[str] = Counter()
        for c in self.communications:
            layers[_layer(c.module)] += c.bytes(tokens, element_size)
        return dict(layers)

    def bytes_sent(self, tokens: int, element_size: int) -> int:
        """Return what each rank sends where collectives run as rings."""
        units = sum(_RING[c.operation] * c.bytes(tokens, element_size) for c in self.communications)
        return units * (self.tp - 1) // self.tp

    def __str__(self) -> str:
        held = [
            (_generic(p.name), p.style or "-", _sizes(p.shape), _local(p)) for p in self.parameters
        ]
        sent = [
            (_generic(c.module), c.phase, c.operation, c.tensor, _formula(c.per_token, c.fixed))
            for c in self.communications
        ]
        total = _formula(
            sum(c.per_token for c in self.communications), sum(c.fixed for c in self.communications)
        )
        return "\n".join(
            [
                *_table(("parameter", "style", "whole", f"on each of {self.tp} ranks"), held),
                "",
                *_table(("module", "when", "operation", "of", "elements"), sent),
                "",
                f"one forward and backward: {total} elements, T = batch x sequence length",
            ]
        )


def _layer(name: str) -> str:
    """Return the numbered layer that a module is in, or its own name."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else name


def _generic(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _local(parameter: ExplainedParameter) -> str:
    if parameter.dim is None:
        return "whole"
    shapes = dict.fromkeys(parameter.local_shapes)
    return " or ".join(map(_sizes, shapes))


def _formula(per_token: int, fixed: int) -> str:
    terms = [f"{per_token} T"] * bool(per_token) + [str(fixed)] * bool(fixed)
    return " + ".join(terms) or "0"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines of columns; equal rows, as layers have, are one with their number."""
    counted = Counter(map(tuple, rows))
    lines = [(*head, "times"), *((*row, str(times)) for row, times in counted.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]

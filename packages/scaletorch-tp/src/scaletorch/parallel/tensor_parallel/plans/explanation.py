"""What a plan does to a model as plain data and as a table: shapes, communication, bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]

# Sent by each rank of a ring, in units of the whole tensor times (tp - 1) / tp.
_RING: dict[Operation, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}

WIDTH = 100  # columns of a screen

# After a blank or a dot, but not inside of a size such as 4 x 4.
_BREAKS = re.compile(r"(?<=[ .])(?!x )(?<! x )")


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    """What ranks hold of a parameter.

    Attributes:
        name: The parameter's; every name of a tied one is listed.
        style: Its module's style; "" if the plan does not name that.
        shape: The whole's.
        dim: The dim it is sharded along; None if every rank has the whole.
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

    Its size is that of the whole tensor: what an all_reduce sums, what an all_gather joins the
    ranks' shares to, and what each rank gives to a reduce_scatter, to get its share of the sum.

    Attributes:
        module: Where it happens.
        phase: "forward" or "backward".
        operation: "all_reduce", "all_gather" or "reduce_scatter".
        tensor: What is summed or joined.
        per_token: Elements of the whole for each token (batch times sequence length).
        fixed: Elements of the whole whatever the number of tokens.
    """

    module: str
    phase: Literal["forward", "backward"]
    operation: Operation
    tensor: str
    per_token: int = 0
    fixed: int = 0

    def bytes(self, tokens: int, element_size: int) -> int:
        """Return the whole tensor's bytes, for so many tokens (B x L) and bytes an element."""
        return (self.per_token * tokens + self.fixed) * element_size


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan does to a model. `dataclasses.asdict` of it is plain data; `str` is a table.

    Attributes:
        tp: Number of ranks.
        parameters: In the model's order.
        communications: Of one forward and backward, in the model's order.
        skeleton: For a model without a plan, the text of a dict to complete and to pass as one;
            parameters and communications are empty then.
    """

    tp: int
    parameters: tuple[ExplainedParameter, ...]
    communications: tuple[Communication, ...]
    skeleton: str = ""

    def bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes of all communicated tensors, each whole, of one forward and backward.

        An all_reduce counts once here, a reduce_scatter and an all_gather in its place twice;
        `bytes_sent` compares them.
        """
        return sum(c.bytes(tokens, element_size) for c in self.communications)

    def bytes_by_layer(self, tokens: int, element_size: int) -> dict[str, int]:
        """Return the same for each numbered layer, and each module outside of these."""
        layers: Counter[str] = Counter()
        for c in self.communications:
            layers[_layer(c.module)] += c.bytes(tokens, element_size)
        return dict(layers)

    def bytes_sent(self, tokens: int, element_size: int) -> int:
        """Return the bytes that each rank sends if collectives run as rings.

        Of a whole tensor that is (tp - 1) / tp for an all_gather and for a reduce_scatter, and
        both for an all_reduce: sequence parallelism sends the same for each region.
        """
        units = sum(_RING[c.operation] * c.bytes(tokens, element_size) for c in self.communications)
        return units * (self.tp - 1) // self.tp

    def bytes_sent_by_layer(self, tokens: int, element_size: int) -> dict[str, int]:
        """Return the same for each numbered layer, and each module outside of these."""
        layers: dict[str, list[Communication]] = {}
        for c in self.communications:
            layers.setdefault(_layer(c.module), []).append(c)
        return {
            layer: replace(self, communications=tuple(own)).bytes_sent(tokens, element_size)
            for layer, own in layers.items()
        }

    def __str__(self) -> str:
        if self.skeleton:
            return self.skeleton
        held = [
            (_generic(p.name), p.style or "-", _sizes(p.shape), _local(p)) for p in self.parameters
        ]
        sent = [
            (_generic(c.module), c.phase, c.operation, c.tensor, _formula([c]))
            for c in self.communications
        ]
        rings = [c for c in self.communications for _ in range(_RING[c.operation])]
        return "\n".join(
            [
                *table(("parameter", "style", "whole", f"on each of {self.tp} ranks"), held),
                "",
                *table(("module", "when", "operation", "of", "elements"), sent),
                "",
                f"one forward and backward: {_formula(self.communications)} elements, "
                "T = batch x sequence length",
                f"each rank of a ring sends {self.tp - 1}/{self.tp} of {_formula(rings)} elements",
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


def _formula(communications: Sequence[Communication]) -> str:
    per_token = sum(c.per_token for c in communications)
    fixed = sum(c.fixed for c in communications)
    terms = [f"{per_token} T"] * bool(per_token) + [str(fixed)] * bool(fixed)
    return " + ".join(terms) or "0"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines of columns; equal rows, as layers have, are one with their number.

    Cells are broken at blanks and dots if the lines would be longer than `WIDTH`.
    """
    counted = Counter(map(tuple, rows))
    cells = [(*head, "times"), *((*row, str(times)) for row, times in counted.items())]
    widths = _widths(cells)
    return [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for row in cells
        for parts in zip_longest(*map(_wrap, row, widths), fillvalue="")
    ]


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    """Return how wide columns are: the widest gives way first, and names in front do last."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    for index in (*sorted(range(1, len(widths)), key=lambda i: -widths[i]), 0):
        pieces = (piece.rstrip() for cell in columns[index] for piece in _BREAKS.split(cell))
        spared = min(max(excess, 0), widths[index] - max(map(len, pieces)))
        widths[index] -= spared
        excess -= spared
    return widths


def _wrap(cell: str, width: int) -> list[str]:
    lines = [""]
    for piece in _BREAKS.split(cell):
        if len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]

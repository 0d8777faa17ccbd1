"""The description of a model: a small JSON, made once with torch and read without it.

A model is a line of blocks, each of a kind: what stands before the layers, the layers, what stands
behind them. How a kind behaves on a rank is measured for each way of cutting it (`Cut`), as numbers
that are affine in the rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..dist.errors import InvalidArgumentError

Kernels = Literal["cpu", "cuda"]  # of which device: what autograd keeps goes by them


@dataclass(frozen=True, slots=True)
class Affine:
    """A number that grows with the rows of a micro-batch: `fixed + per_row * rows`."""

    fixed: float = 0
    per_row: float = 0

    def at(self, rows: int) -> float:
        """Return the number for so many rows."""
        return self.fixed + self.per_row * rows


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kind.

    Attributes:
        name: Inside its block.
        elements: Of the whole tensor.
        item: Bytes of an element.
        local: Elements on a rank, that with the most.
        expert: Whether it belongs to experts, which are divided over ep.
    """

    name: str
    elements: int
    item: int
    local: int
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of one sort that a block makes for a micro-batch.

    Attributes:
        axis: "tp", "cp" or "ep".
        operation: As `scaletorch.dist` calls it: "all_reduce", "all_gather", "reduce_scatter",
            "all_to_all", "send" ...
        phase: Whether forward or backward makes them.
        count: How many.
        bytes: What this rank sends over the wire in all of them, as rings send it.
        awaited: Whether computation waits for them; False if they are asynchronous.
    """

    axis: str
    operation: str
    phase: Literal["forward", "backward"]
    count: int
    bytes: Affine
    awaited: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one sort of a block for a micro-batch.

    Attributes:
        operation: "matmul", "attention", or "other", which only moves memory.
        count: How many.
        flops: Of all of them.
        moved: Bytes that all of them read and write.
        phase: Whether forward or backward runs them.
    """

    operation: str
    count: int
    flops: Affine
    moved: Affine
    phase: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The work and memory of a kind of block on the fullest rank of a cut.

    Attributes:
        parameters: Its parameters and how they are cut.
        kept: Bytes that autograd keeps between forward and backward, each memory once, without
            parameters and without `shared`.
        shared: Bytes that all layers of a stage keep together, once: angles of positions, a mask.
            Of kinds that keep unlike ones, such as masks of two sorts, the larger counts.
        left: Bytes that the first half of a backward leaves for the second: inputs of linear
            layers, each memory once, and gradients of their outputs.
        entered: Bytes of its input, which is all that is kept with `recompute`; the rest of `kept`
            comes when it runs again.
        forward_peak: Bytes above `kept` while forward runs.
        backward_peak: Bytes above `kept` while backward runs, without gradients of parameters.
        handed: Bytes of what it returns to the next block.
        sent: Its collectives.
        work: Its operations.
    """

    parameters: tuple[Parameter, ...]
    kept: Affine = Affine()
    shared: Affine = Affine()
    left: Affine = Affine()
    entered: Affine = Affine()
    forward_peak: Affine = Affine()
    backward_peak: Affine = Affine()
    handed: Affine = Affine()
    sent: tuple[Sent, ...] = ()
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """The division of a layer.

    Attributes:
        tp: Tensor parallel size.
        cp: Context parallel size.
        ep: Expert parallel size.
        sequence_parallel: Whether tp ranks hold shares of sequences between sharded layers.
        cp_method: How cp ranks attend; "" if cp is 1.
        selective: Whether layers make again what is cheap, which changes what they keep and send.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    cp_method: str = ""
    selective: bool = False

    def __str__(self) -> str:
        """Return what is not 1, such as "tp 4, cp 2, sp, ring"."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep}
        said = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        said += ["sp"] * self.sequence_parallel
        said += [self.cp_method] * (self.cp > 1)
        said += ["selective"] * self.selective
        return ", ".join(said) or "whole"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the line.

    Attributes:
        name: Of its module, such as "model.layers.3"; several, before or behind the layers, with +.
        kind: Index into `Behaviour`s.
        place: "first", "layer" or "last".
    """

    name: str
    kind: int
    place: Literal["first", "layer", "last"]


@dataclass(frozen=True, slots=True)
class Description:
    """A model and a length of sequences.

    Attributes:
        name: Of the model.
        length: Tokens of a sequence.
        dtype: Of parameters, without "torch.".
        blocks: In the order of the forward.
        cuts: Behaviours of the kinds, by how they are cut.
        refused: Cuts that the model cannot have, and why.
        tied: Names of parameters, as "kind.parameter", that are one tensor.
        source: What it was made with: versions, or a paper.
        early: Whether messages between stages begin early and are held as this library's runtime
            does it; in another program there is one that has come, and one on its way.
        kernels: Of which device it was described with.
    """

    name: str
    length: int
    dtype: str
    blocks: tuple[Block, ...]
    cuts: dict[Cut, tuple[Behaviour, ...]]
    refused: dict[Cut, str] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    source: str = ""
    early: bool = True
    kernels: Kernels = "cpu"

    def behaviours(self, cut: Cut) -> tuple[Behaviour, ...]:
        """Return how the kinds behave in a cut.

        Raises:
            InvalidArgumentError: The model cannot be cut so, or it was not described.
        """
        if (found := self.cuts.get(cut)) is not None:
            return found
        raise InvalidArgumentError(
            self.refused.get(cut) or f"{self.name} is not described with {cut}"
        )

    @property
    def elements(self) -> int:
        """Parameters of the whole model, what is tied once."""
        whole = self.behaviours(Cut())
        twice = {name for names in self.tied for name in names[1:]}
        return sum(
            p.elements
            for block in self.blocks
            for p in whole[block.kind].parameters
            if f"{block.kind}.{p.name}" not in twice
        )

"""The description of a model, made with torch and read without it, and the layouts of a job.

A model is a sequence of blocks: the modules before the layers, the layers, and the modules after
them. Equal blocks share a kind. The work and memory of a kind on a rank are measured for each cut
(`Cut`), as affine functions of the rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid
from ..parallel.pipeline_parallel import interleaved_1f1b, looped_breadth_first

Kernels = Literal["cpu", "cuda"]  # device type; what autograd keeps depends on it
Recompute = Literal["none", "selective", "full"]
# Schedules with any number of chunks (`CHUNKS` has the default); V-shaped ones have two.
LOOPED = {"interleaved_1f1b": interleaved_1f1b, "looped_bfs": looped_breadth_first}
V_SHAPED = ("zb_v", "dualpipe_v")
CHUNKS = dict.fromkeys((*LOOPED, *V_SHAPED), 2)


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity that is affine in the rows of a micro-batch: `fixed + per_row * rows`."""

    fixed: float = 0
    per_row: float = 0

    def at(self, rows: int) -> float:
        """Return the value for a number of rows."""
        return self.fixed + self.per_row * rows


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kind of block."""

    name: str  # inside its block
    elements: int  # elements of the full tensor
    item: int  # bytes of an element
    local: int  # elements on the rank that holds the most
    expert: bool = False  # whether it belongs to experts, which are divided over ep
    deferred: bool = False  # whether the second half of a split backward makes its gradient


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of one kind that a block runs for a micro-batch."""

    axis: str  # "tp", "cp" or "ep"
    operation: str  # its name in `scaletorch.dist`, such as "all_reduce" or "send"
    phase: Literal["forward", "backward"]
    count: int
    bytes: Affine  # bytes that this rank sends in all of them with ring algorithms
    awaited: bool = True  # whether computation waits for them; False if they are asynchronous


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one kind that a block runs for a micro-batch."""

    operation: str  # "matmul", "attention", or "other", which only moves memory
    count: int
    flops: Affine  # total flops
    moved: Affine  # total bytes read and written
    phase: Literal["forward", "backward"] = "forward"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The work and memory of a kind of block on the fullest rank of a cut."""

    parameters: tuple[Parameter, ...]
    # Bytes that autograd keeps between forward and backward, without parameters and `shared`; each
    # storage counts once.
    kept: Affine = Affine()
    # Bytes that all layers of a stage share, such as rotary angles or a mask. If kinds share
    # different ones, such as two kinds of masks, the larger counts.
    shared: Affine = Affine()
    # Bytes that a split backward keeps from its first to its second half: inputs of linear layers,
    # each storage once, and gradients of their outputs.
    left: Affine = Affine()
    # Bytes of its input, which is all that `recompute` keeps; backward computes the rest of `kept`
    # again.
    entered: Affine = Affine()
    forward_peak: Affine = Affine()  # bytes above `kept` while forward runs
    backward_peak: Affine = Affine()  # the same while backward runs, without parameter gradients
    handed: Affine = Affine()  # bytes of the output that the next block gets
    sent: tuple[Sent, ...] = ()
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """The way a layer is divided over ranks."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False  # whether tp ranks hold sequence shards in the layers
    cp_method: str = ""  # attention method of context parallelism; "" if cp is 1
    # Whether layers recompute cheap operations, which changes what they keep and send.
    selective: bool = False

    def __str__(self) -> str:
        """Return the settings that differ from the default, such as "tp 4, cp 2, sp, ring"."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep}
        said = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        said += ["sp"] * self.sequence_parallel
        said += [self.cp_method] * (self.cp > 1)
        said += ["selective"] * self.selective
        return ", ".join(said) or "whole"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the model."""

    name: str  # of the module; before and after the layers, several names joined by "+"
    kind: int  # index into the `Behaviour`s of a cut
    place: Literal["first", "layer", "last"]


@dataclass(frozen=True, slots=True)
class Description:
    """A model at one sequence length."""

    name: str
    length: int  # tokens of a sequence
    dtype: str  # dtype of the parameters, without "torch."
    blocks: tuple[Block, ...]  # in the order of the forward
    cuts: dict[Cut, tuple[Behaviour, ...]]  # the behaviour of each kind, by cut
    refused: dict[Cut, str] = field(default_factory=dict)  # cuts that it cannot have, with reasons
    tied: tuple[tuple[str, ...], ...] = ()  # groups of "kind.parameter" that share one tensor
    source: str = ""  # origin: library versions, or a paper
    # Whether pipeline messages start early and gradients are allocated late, as in this library.
    # Other programs (False) hold one received and one outgoing message.
    early: bool = True

    def behaviours(self, cut: Cut) -> tuple[Behaviour, ...]:
        """Return the behaviour of each kind in a cut.

        Raises:
            InvalidArgumentError: The model cannot have this cut, or was not described with it.
        """
        if (found := self.cuts.get(cut)) is not None:
            return found
        raise InvalidArgumentError(
            self.refused.get(cut) or f"{self.name} is not described with {cut}"
        )

    @property
    def elements(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        whole = self.behaviours(Cut())
        twice = {name for names in self.tied for name in names[1:]}
        return sum(
            p.elements
            for block in self.blocks
            for p in whole[block.kind].parameters
            if f"{block.kind}.{p.name}" not in twice
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """A parallel layout and its training options."""

    grid: Grid
    sequence_parallel: bool = False  # as for `parallelize`
    recompute: Recompute = "none"  # "full" is `recompute=True` of `parallelize`
    zero: int = 0  # ZeRO stage over cp x dp, 0 to 3
    schedule: str = "1f1b"  # pipeline schedule, a name of `SCHEDULES`
    chunks: int = 1  # stages on each pipeline rank
    cp_method: str = "ring"  # attention method of context parallelism
    micro_rows: int = 1  # rows of a micro-batch
    micro_batches: int = 1  # of a step on each data-parallel rank

    @property
    def cut(self) -> Cut:
        """The cut of its layers."""
        grid = self.grid
        return Cut(
            grid.tp, grid.cp, grid.ep, self.sequence_parallel and grid.tp > 1,
            self.cp_method if grid.cp > 1 else "", self.recompute == "selective",
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `parallelize`; `zero` is not one, it is for `shard_optimizer`."""
        chunked = LOOPED.get(self.schedule)
        return {
            "sequence_parallel": self.sequence_parallel,
            "recompute": {"none": False, "full": True}.get(self.recompute, self.recompute),
            "schedule": partial(chunked, num_chunks=self.chunks) if chunked else self.schedule,
            "cp_method": self.cp_method,
        }

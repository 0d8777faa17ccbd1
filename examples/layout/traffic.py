"""What a rank of a layout sends in a step, and how long that would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from job import ITEM, Division, inside

from scaletorch.parallel.context_parallel import volumes
from scaletorch.parallel.pipeline_parallel import Send, derive_messages

COMPARISON = 128  # bytes of what ranks compare before each attention


class Sent(NamedTuple):
    """What one rank sends over one axis in a step.

    Attributes:
        bytes: In all.
        steps: Messages one after another, as a ring sends them.
    """

    bytes: int
    steps: int


def sent(division: Division, stage: int) -> dict[str, Sent]:
    """Return what a rank of a stage sends over each axis.

    Left out are a few numbers: of valid tokens, of the loss, of the gradient's norm.
    """
    return {
        "tp": _tensor(division, stage),
        "cp": _context(division, stage),
        "pp": _pipeline(division, stage),
        "dp": _data(division, stage),
    }


def _tensor(division: Division, stage: int) -> Sent:
    own = tuple(
        each
        for each in division.explanation.communications
        if inside(each.module, division.stages[stage])
    )
    once = replace(division.explanation, communications=own).bytes_sent(division.tokens, ITEM)
    hops = sum(2 if each.operation == "all_reduce" else 1 for each in own) * (division.grid.tp - 1)
    return Sent(once * division.micro_batches, hops * division.micro_batches)


def _context(division: Division, stage: int) -> Sent:
    config, grid = division.job.config, division.grid
    if grid.cp == 1:
        return Sent(0, 0)
    heads, rows = config.num_heads, division.job.micro_rows
    volume = volumes(
        -(-heads // grid.tp),
        max(1, config.num_kv_heads // grid.tp),
        division.tokens // rows,
        config.hidden_size // heads,
        ranks=grid.cp,
        batch=rows,
    )[division.job.method]
    calls = division.num_layers(stage) * division.micro_batches
    compared = COMPARISON * (grid.cp - 1)
    forward_and_backward = sum(volume) + compared
    return Sent(calls * forward_and_backward, calls * 2 * (grid.cp - 1))


def _pipeline(division: Division, stage: int) -> Sent:
    program = derive_messages(division.schedule())[stage]
    messages = sum(isinstance(each, Send) for each in program)
    hidden = division.tokens * division.job.config.hidden_size
    # Two stages with one tied weight sum its gradient.
    return Sent((messages * hidden + division.tied(stage)) * ITEM, messages)


def _data(division: Division, stage: int) -> Sent:
    ranks = division.grid.dp * division.grid.cp
    sizes = division.parameters(stage)
    # Gradients; for each whether a rank used it; and four words on how often backward, zero_grad
    # and no_sync ran.
    whole = ITEM * (sum(sizes) + len(sizes) + 4)
    hops = 4 * (ranks - 1)  # two all-reduces: of buckets under way at once, and of these words
    return Sent(2 * whole * (ranks - 1) // ranks, hops)


def seconds(traffic: Mapping[str, Sent], latency: float, bandwidth: float) -> float:
    """Return the time of all messages, were none hidden behind computation.

    Args:
        traffic: As `sent` returns it.
        latency: Seconds of one message, however small.
        bandwidth: Bytes a second.
    """
    return sum(each.steps * latency + each.bytes / bandwidth for each in traffic.values())

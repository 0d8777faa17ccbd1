"""What a rank of a layout holds: parameters, gradients, the optimizer's state, activations."""

from __future__ import annotations

from typing import NamedTuple

from job import ITEM, Division

from scaletorch.parallel.pipeline_parallel import check


class Memory(NamedTuple):
    """Bytes on one rank.

    Attributes:
        parameters: Its shards of its stage.
        gradients: As many, twice of what is tied to another stage; with ZeRO-1 beside them this
            rank's share of the sums.
        state: Two moments of AdamW for each element, and a step for each tensor.
        activations: Kept for backward, at the most; those of a micro-batch for each that is under
            way, by formula.
    """

    parameters: int
    gradients: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def memory(division: Division, stage: int, tp_rank: int = 0) -> Memory:
    """Return the bytes of a rank of this stage and tp rank."""
    sizes, tied = division.parameters(stage, tp_rank), division.tied(stage, tp_rank)
    elements, replicas = sum(sizes), division.grid.dp * division.grid.cp
    gradients, moments = elements + tied, 2 * elements
    if division.job.zero and replicas > 1:  # what is tied to another stage stays whole
        share = -(-(elements - tied) // replicas)
        gradients, moments = gradients + share, 2 * (share + tied)
    state = moments + len(sizes)
    kept = _activations(division, stage)
    return Memory(*(ITEM * each for each in (elements, gradients, state, kept)))


def largest(division: Division) -> tuple[int, Memory]:
    """Return the stage that needs the most, and what it needs; tp rank 0 has the largest shards."""
    each = [memory(division, stage) for stage in range(division.grid.pp)]
    stage = max(range(len(each)), key=lambda index: each[index].total)
    return stage, each[stage]


def _activations(division: Division, stage: int) -> int:
    """Return elements that are kept for backward when the most are.

    For each micro-batch under way (`peak_live` of the checked schedule) its layers, and on the last
    stage the final norm and the logits.
    """
    kept = division.num_layers(stage) * _of_layer(division)
    if stage == division.grid.pp - 1:
        kept += _of_head(division)
    return check(division.schedule()).peak_live[stage] * kept * division.tokens


def _of_layer(division: Division) -> int:
    """Return elements of a layer for each token.

    Around attention and around the MLP: the input of the norm, what it normalised and what it
    returned, whole on every tp rank. Inside, divided by tp: query, key, value, the attended value
    as the kernel and as the projection see it; the MLP's gate, its activation, up, their product.
    """
    config = division.job.config
    head = config.hidden_size // config.num_heads
    whole = 6 * config.hidden_size
    attention = 3 * config.hidden_size + 2 * config.num_kv_heads * head + config.num_heads
    return whole + (attention + 4 * config.intermediate_size) // division.grid.tp


def _of_head(division: Division) -> int:
    """Return elements of the final norm and the log-probabilities for each token."""
    return 3 * division.job.config.hidden_size + division.job.config.vocab_size

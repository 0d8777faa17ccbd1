"""Adapt a plan to sequence parallelism, and refuse models that it would break."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import Boundary, ModelView, modules_within
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import HeadParameters
from ..regions.region import TailShared
from ..sharing.sequence import OF_TOKENS, WHOLE_IDS
from .plan import Match, look_up


def kept_whole_on_shares(
    model: nn.Module, matches: Mapping[nn.Module, Match], full: Collection[nn.Module]
) -> dict[nn.Module, Match]:
    """Return the matches, with "row_split" layers replicated if they are not in `full` modules.

    On sequence shards their all-reduce would add up outputs of different tokens.
    """
    layers = [m.module for m in matches.values() if m.style == "sequence_layer"]
    on_shards = modules_within(layers or [model]) - modules_within(full)
    return {
        module: look_up(m.name, module, m.pattern, "replicate")
        if m.style == "row_split" and module in on_shards
        else m
        for module, m in matches.items()
    }


def layers_that_share(view: ModelView, matches: Sequence[Match]) -> list[Match]:
    """Return "sequence_layer" matches if only the layers can work on sequence shards, else none.

    So it is if layers get other per-token inputs, or images, audio or a head need full sequences.
    """
    model = view.model
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if any(m.style == "sequence_layer" for m in matches) or not isinstance(decoder, nn.Module):
        return []
    sharded = {m.module for m in matches if m.layer is not None}
    lists = (m for m in decoder.children() if isinstance(m, nn.ModuleList))
    found = [layers for layers in lists if sharded.intersection(layers.modules())]
    if len(found) != 1:
        return []
    [layers] = found
    base = getattr(model, "base_model", None)
    outside = {*view.names} - {*layers.modules()}
    names = {name for layer in layers for name in signature(layer.forward).parameters}
    if (
        names.isdisjoint((*OF_TOKENS, *WHOLE_IDS))
        and getattr(base, "config", None) is getattr(decoder, "config", None)
        and not any(isinstance(module, nn.MultiheadAttention) for module in outside)
        and not _has_other_head(model, base, matches)
    ):
        return []
    return [look_up(view.names[m], m, view.names[m], "sequence_layer") for m in layers]


def _has_other_head(model: nn.Module, base: Any, matches: Sequence[Match]) -> bool:
    """Return whether the modules outside the base model do not gather sequence shards."""
    # A base model's `base_model` is itself; that of an adapter wrapper is not.
    if base is model or getattr(base, "base_model", None) is not base or base is None:
        return False
    inside = {*base.modules()}
    return not any(m.options.get("gather_output") for m in matches if m.module not in inside)


def check_in_attention(
    matches: Iterable[Match], regions: Collection[nn.Module], whole: Collection[nn.Module]
) -> None:
    """Refuse per-head parameters in modules that would work on sequence shards."""
    inside = modules_within(whole)
    for match in matches:
        of_heads = match.becomes(HeadParameters) and match.module not in regions
        if (of_heads or match.mixin is TailShared) and match.module not in inside:
            raise InvalidArgumentError(
                f"{match.place} is in no attention that could be given whole sequences; do "
                "without sequence parallelism"
            )


def check_sequences(view: ModelView, matches: Sequence[Match]) -> None:
    """Refuse a model whose result would be wrong on sequence shards."""
    layers = {m.name.rpartition(".")[0] for m in matches if m.style == "sequence_layer"}
    first, *rest = sorted(layers) or [""]
    if rest:  # only the last layer of one list would gather
        raise InvalidArgumentError(
            f"the plan gives the style 'sequence_layer' to the layers of {first} and of "
            f"{', '.join(rest)}, but only the last layer of one list gathers sequences; do without "
            "sequence parallelism"
        )
    for match in matches:
        usual = match.layer is not None and not {"arrives", "returns"} & {*match.options}
        if isinstance(match.style, Boundary) and match.style.converts and not usual:
            raise InvalidArgumentError(
                f"{match.place} converts at its boundary, and sequence parallelism does so between "
                "all layers: write the boundary without conversions, or do without sequence "
                "parallelism"
            )
    for match in (m for m in matches if m.becomes(ParallelMultiheadAttention)):
        if not vars(match.module)["batch_first"]:
            raise InvalidArgumentError(
                f"{match.place} takes sequences as [L, B, E], of which sequence parallelism would "
                "divide the batch; build it with batch_first=True, or do without sequence "
                "parallelism"
            )
    for module, name in view.names.items():
        if getattr(module, "layerdrop", 0):
            raise InvalidArgumentError(
                f"'{name}' leaves out layers at random (layerdrop), and with sequence parallelism "
                "each rank draws for itself; set its layerdrop to 0, or do without"
            )

"""What of a plan matters where hidden states are shares of sequences, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import signature

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..layers.heads import HeadParameters
from ..layers.multihead import ParallelMultiheadAttention
from ..sharing.sequence import until_joined
from ..sharing.sequence_layers import OF_TOKENS, WHOLE_IDS, inside_layers
from ..sharing.shared_tail import TailShared
from .plan import Match, look_up


def heads_that_gather(model: nn.Module, matches: Sequence[Match]) -> list[Match]:
    """Return the matches, with heads that divide their input as ones that divide their output.

    Their input is whole sequences then, of shares that they gather themselves.
    """
    base = getattr(model, "base_model", None)
    if not isinstance(base, nn.Module) or base is model:
        return [*matches]
    inside = {*base.modules()}
    return [
        look_up(m.name, m.module, m.pattern, "column_gather")
        if m.style == "row_split" and m.module not in inside
        else m
        for m in matches
    ]


def kept_whole_on_shares(
    matches: Mapping[nn.Module, Match], within: Collection[nn.Module]
) -> dict[nn.Module, Match]:
    """Return the matches, of which layers that cut a whole input stay whole on shares of tokens.

    Ranks would add up products of different tokens there.

    Args:
        matches: Module -> its match.
        within: Modules inside of which sequences are whole.
    """
    inside = {inner for module in within for inner in module.modules()}
    return {
        module: look_up(m.name, module, m.pattern, "sequence")
        if m.style == "row_split" and module not in inside
        else m
        for module, m in matches.items()
    }


def layers_that_share(model: nn.Module, matches: Sequence[Match]) -> list[Match]:
    """Return the layers to which shares are confined, where what is before them needs the whole.

    That is a model of transformers whose layers are given something else of each token, or which
    has other parts (of images, of sound) beside its layers.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if any(m.style == "sequence_layer" for m in matches) or not isinstance(decoder, nn.Module):
        return []
    sharded = {m.module for m in matches if m.layer is not None}
    lists = (m for m in decoder.children() if isinstance(m, nn.ModuleList))
    found = [each for each in lists if sharded.intersection(each.modules())]
    if len(found) != 1 or not _needs_whole(model, decoder, found[0]):
        return []
    names = {module: name for name, module in model.named_modules()}
    return [look_up(names[m], m, names[m], "sequence_layer") for m in found[0]]


def _needs_whole(model: nn.Module, decoder: nn.Module, layers: nn.ModuleList) -> bool:
    given = {name for layer in layers for name in signature(layer.forward).parameters}
    if given.intersection((*OF_TOKENS, *WHOLE_IDS)):
        return True
    base = getattr(model, "base_model", None)
    if getattr(base, "config", None) is not getattr(decoder, "config", None):
        return True  # of which the text is a part
    outside = {*model.modules()} - {*layers.modules()}
    return any(module._parameters and _reads_parameters_of(module) for module in outside)


def join_of(model: nn.Module, matches: Sequence[Match]) -> list[Match]:
    """Return where sequences are joined for a head that is no layer which gathers them.

    That is behind the model within a model of transformers.
    """
    base = getattr(model, "base_model", None)
    # Another's base, such as that of adapters around a model, says that it has a base itself.
    if base is model or getattr(base, "base_model", None) is not base:
        return []
    if not isinstance(base, nn.Module) or base not in {*model.modules()}:
        return []
    names = {module: name for name, module in model.named_modules()}
    behind = [match for match in matches if match.module not in {*base.modules()}]
    gathers = any(m.options.get("gather_output") for m in behind)
    ends = ("sequence_join", "sequence_layer")
    if gathers or any(m.style in ends or m.module is base for m in matches):
        return []
    return [look_up(names[base], base, names[base], "sequence_join")]


def check_in_attention(
    matches: Iterable[Match], regions: Collection[nn.Module], whole: Collection[nn.Module]
) -> None:
    """Refuse what belongs to heads, where their module would work on shares of sequences."""
    inside = {inner for module in whole for inner in module.modules()}
    for match in matches:
        of_heads = match.becomes(HeadParameters) and match.module not in regions
        if (of_heads or match.mixin is TailShared) and match.module not in inside:
            raise InvalidArgumentError(
                f"{match.place} is in no attention that could be given whole sequences; do "
                "without sequence parallelism"
            )


def check_sequences(model: nn.Module, matches: Sequence[Match]) -> None:
    """Refuse a model that would compute something else on shards of its sequences.

    Raises:
        InvalidArgumentError: Sharded layers other than heads are registered after the module that
            joins the shards, or layers are left out at random.
    """
    joins = [match for match in matches if match.style == "sequence_join"]
    layers = [match for match in matches if match.style == "sequence_layer"]
    shared = until_joined(model, [match.module for match in joins])
    if layers:
        shared = inside_layers(model, [match.module for match in layers])
        _check_layers(layers, joins)
    if len(joins) > 1:
        raise InvalidArgumentError(
            f"the plan joins sequences behind {', '.join(join.name for join in joins)}, and they "
            "can be joined once; do without sequence parallelism"
        )
    if joins:
        before = {*shared}
        _check_joined(joins[0], [match for match in matches if match.module not in before])
    for match in (m for m in matches if m.becomes(ParallelMultiheadAttention)):
        if not vars(match.module)["batch_first"]:
            raise InvalidArgumentError(
                f"{match.place} takes sequences as [L, B, E], of which sequence parallelism would "
                "divide the batch; build it with batch_first=True, or do without sequence "
                "parallelism"
            )
    for name, module in model.named_modules():
        if getattr(module, "layerdrop", 0):
            raise InvalidArgumentError(
                f"'{name}' leaves out layers at random (layerdrop), and with sequence parallelism "
                "each rank draws for itself; set its layerdrop to 0, or do without"
            )


def _check_layers(layers: Sequence[Match], joins: Sequence[Match]) -> None:
    """Refuse layers that are not of one list, of which the last one would not join."""
    lists = {match.name.rpartition(".")[0] for match in layers}
    others = [*sorted(lists)[1:], *(match.name for match in joins)]
    if others:
        raise InvalidArgumentError(
            f"the plan shares sequences out in the layers of {sorted(lists)[0]} (style "
            f"'sequence_layer'), and names {', '.join(others)} beside them: the last layer of one "
            "list joins sequences; do without sequence parallelism"
        )


def _check_joined(join: Match, after: Collection[Match]) -> None:
    wrong = [m.name for m in after if m.layer is not None and not m.options.get("gather_output")]
    if wrong:
        raise InvalidArgumentError(
            f"'{join.name}' joins the sequences for heads ('column_gather') alone, but "
            f"{', '.join(wrong[:4])} are registered after it; register them before, or do without "
            "sequence parallelism"
        )


def _reads_parameters_of(module: nn.Module) -> bool:
    """Return whether a module's parameters are used by others, past its forward."""
    kind = type(module).__name__
    read = isinstance(module, nn.ParameterList | nn.ParameterDict)
    return read or kind == "NonDynamicallyQuantizableLinear" or "forward" in vars(module)

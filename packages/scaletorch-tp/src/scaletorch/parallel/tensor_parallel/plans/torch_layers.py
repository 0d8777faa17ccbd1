"""Built-in plans for the encoder and decoder layers of `torch.nn`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from .plan import Match, Recognised, Style, look_up, with_outputs

_KINDS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_OWN = ("forward", "_sa_block", "_mha_block", "_ff_block")
_STYLES: dict[str, Style] = {
    "self_attn": "attention",
    "multihead_attn": "attention",
    "linear1": "column",
    "linear2": "row",
}


def find_torch_layers(model: nn.Module, divided: Collection[nn.Module] = ()) -> Recognised | None:
    """Match the encoder and decoder layers of `torch.nn` in a model; return None without any.

    A subclass with its own forward does not count. Modules outside these layers stay replicated.

    Args:
        model: The whole model.
        divided: Modules that another strategy has divided over these ranks.
    """
    matches: dict[nn.Module, Match] = {}
    for name, layer in model.named_modules():
        if computes_as_torch(layer):
            for own, module, style in _parts(layer):
                if module not in divided:
                    place = f"{name}.{own}".strip(".")
                    matches.setdefault(module, look_up(place, module, place, style))
    if not matches:
        return None
    matches = with_outputs(matches)
    ordered = [matches[module] for module in model.modules() if module in matches]
    return Recognised(ordered, ())


def computes_as_torch(layer: nn.Module) -> bool:
    """Return whether a module is a `torch.nn` encoder or decoder layer with torch's forward."""
    kind = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
    return kind is not None and all(
        getattr(type(layer), name, None) is getattr(kind, name, None) for name in _OWN
    )


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module, Style]]:
    """Yield the relative name, module and style of a layer and its sharded submodules."""
    yield "", layer, "sequence_layer"
    for name, style in _STYLES.items():
        if name in layer._modules:
            yield name, layer.get_submodule(name), style
